"""Operand patterns, the leaves of a pattern: bindings of values from outside the match, and plain values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch

from quantc.errors import PatternError, suggest
from quantc.ir.types import DTYPE_NAMES, DTYPES
from quantc.patterns.checks import Key, Plain, key_of, plain


class LeafKind(Enum):
    """The kind of value a leaf binds."""

    VALUE = "value"
    CONST = "const"
    NUMBER = "number"
    LIST = "list"


@dataclass(frozen=True, repr=False)
class Leaf:
    """Binds an operand to `name`; the name `_` binds nothing.

    `dtypes` and `ranks` restrict the accepted tensors; empty is any.
    """

    kind: LeafKind
    name: str = "_"
    may_be_absent: bool = False
    dtypes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.is_anything:
            object.__setattr__(self, "may_be_absent", False)
        if self.name != "_" and (not self.name.isidentifier() or self.name == "out"):
            raise PatternError(
                f"{self.name!r} cannot name an operand",
                advice="use a Python identifier other than `out`; add ? for one that may be absent, * for a list",
            )
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise PatternError(f"unknown dtype {dtype!r}", advice=suggest(dtype, DTYPES, noun="dtypes"))
        if any(type(rank) is not int or rank < 0 for rank in self.ranks):
            raise PatternError(f"{self.ranks} are not ranks", advice="a rank is a number of dimensions, such as 4")
        if (self.dtypes or self.ranks) and self.kind in (LeafKind.NUMBER, LeafKind.LIST):
            raise PatternError(f"a {self.kind.value} has neither dtype nor rank", advice="use value() or const()")

    @property
    def is_anything(self) -> bool:
        """True if it accepts any operand, even an absent one."""
        return self.kind is LeafKind.VALUE and self.name == "_" and not self.dtypes and not self.ranks

    @property
    def is_open(self) -> bool:
        """True if a chain may substitute a node for it."""
        return self.kind is LeafKind.VALUE

    @property
    def token(self) -> str:
        """The name as it is written: `x`, `b?`, `xs*`."""
        suffix = "?" if self.may_be_absent else ""
        return f"{self.name}*{suffix}" if self.kind is LeafKind.LIST else f"{self.name}{suffix}"

    def __str__(self) -> str:
        extra = [f"dtype={'|'.join(self.dtypes)}"] if self.dtypes else []
        extra += [f"rank={'|'.join(map(str, self.ranks))}"] if self.ranks else []
        if self.kind in (LeafKind.CONST, LeafKind.NUMBER) or extra:
            return f"{self.kind.value}({', '.join([self.token, *extra])})"
        return self.token

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False, init=False)
class LiteralValue:
    """An operand that is a plain value: `add("x", 3)`."""

    value: Plain = field(compare=False)
    key: Key = field(init=False)

    def __init__(self, value: object) -> None:
        clean = plain(value)
        object.__setattr__(self, "value", clean)
        object.__setattr__(self, "key", key_of(clean))

    def __str__(self) -> str:
        return repr(self.value)

    def __repr__(self) -> str:
        return str(self)


ANYTHING = Leaf(LeafKind.VALUE)


def leaf(
    token: str,
    kind: LeafKind = LeafKind.VALUE,
    dtypes: Iterable[str] = (),
    ranks: Iterable[int] = (),
) -> Leaf:
    """Parse `x`, `b?`, `xs*` or `_`."""
    name = token.removesuffix("?")
    may_be_absent = name != token
    if name.endswith("*"):
        name = name.removesuffix("*")
        if kind is not LeafKind.VALUE:
            raise PatternError(f"{token!r} cannot be both a list and a {kind.value}")
        kind = LeafKind.LIST
    return Leaf(kind, name, may_be_absent, tuple(dtypes), tuple(ranks))


def value(name: str, *, dtype: DTypes = (), rank: Ranks = ()) -> Leaf:
    """A value of certain dtypes or ranks: `value("x", dtype="f32", rank=4)`. A bare string is any value."""
    return leaf(name, LeafKind.VALUE, _dtypes(dtype), _ranks(rank))


def const(name: str, *, dtype: DTypes = (), rank: Ranks = ()) -> Leaf:
    """A parameter, buffer or other constant tensor: `const("w")`, `const("b?")`."""
    return leaf(name, LeafKind.CONST, _dtypes(dtype), _ranks(rank))


def number(name: str) -> Leaf:
    """A Python number: `number("c")`."""
    return leaf(name, LeafKind.NUMBER)


DTypes = str | torch.dtype | Iterable[str | torch.dtype]
Ranks = int | Iterable[int]


def _dtypes(dtype: DTypes) -> tuple[str, ...]:
    items = (dtype,) if isinstance(dtype, str | torch.dtype) else tuple(dtype)
    return tuple(DTYPE_NAMES.get(item, str(item)) if isinstance(item, torch.dtype) else item for item in items)


def _ranks(rank: Ranks) -> tuple[int, ...]:
    return (rank,) if isinstance(rank, int) else tuple(rank)
