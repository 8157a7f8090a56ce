"""Types of nodes, held against those that their ops give on the types of their operands.

Ops run on the meta device, where tensors have a type and no numbers. What they give is remembered by op and operands, so
that a program that is verified after every pass is inferred once. Symbols of sizes stand for one size within their
bounds. An op that does not run there, or whose operands have no type, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.ir.dialect import target_name
from quantc.ir.signature import Signature
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import ScalarType, TensorType, TupleType, ValueType, type_of, type_of_value

SIZE = 5
"""The size that a symbol stands for, where its bounds allow it."""
REMEMBERED = 1 << 14
LITERALS = (bool, int, float, str, type(None), torch.dtype, torch.layout, torch.memory_format)


class _UnknownError(Exception):
    """An operand has no type, or is nothing that can stand on the meta device."""


def sample_sizes(signature: Signature) -> dict[str, int]:
    """A size for each symbol of a program."""
    return {name: max(low, min(SIZE, SIZE if high is None else high)) for name, (low, high) in signature.ranges.items()}


def why_not_type(node: fx.Node, target: OpOverload, sizes: Mapping[str, int]) -> Iterator[str]:
    """The mismatch between the type of a node and what its op gives, if there is one."""
    written = type_of(node)
    if not isinstance(written, TensorType | TupleType):
        return
    try:
        args = tuple(_frozen(value, sizes) for value in node.args)
        kwargs = tuple((name, _frozen(value, sizes)) for name, value in node.kwargs.items())
        expected = _bound(written, sizes)
    except _UnknownError:
        return
    given = _inferred(target, args, kwargs)
    if given is not None and not _agree(expected, given):
        where = ", ".join(f"{name}={size}" for name, size in sizes.items() if name in str(written))
        at = f", at {where}" if where else ""
        yield f"its type is {written}, but {target_name(target)} gives {given} here{at}"


def why_not_constant_type(node: fx.Node, value: object) -> Iterator[str]:
    """The mismatch between the type of a node and the constant that it reads."""
    written = type_of(node)
    given = type_of_value(value) if isinstance(value, torch.Tensor) else None
    if written is not None and given is not None and written != given:
        yield f"its type is {written}, but the constant {node.target!r} is {given}"


def _bound(kind: ValueType | None, sizes: Mapping[str, int]) -> ValueType | None:
    """A type with numbers for its sizes."""
    if isinstance(kind, TupleType):
        return TupleType(tuple(_bound(item, sizes) for item in kind.items))
    return (
        TensorType(kind.dtype, tuple(_size(size, sizes) for size in kind.shape))
        if isinstance(kind, TensorType)
        else None
    )


def _size(size: int | str, sizes: Mapping[str, int]) -> int:
    found = size if isinstance(size, int) else evaluate(size, sizes)
    if found is None:
        raise _UnknownError
    return found


def _agree(expected: ValueType | None, given: ValueType | None) -> bool:
    """True if two types are the same where both are known. Of several outputs the first counts: the sizes of others may
    depend on the device, as those of embedding_bag do."""
    if isinstance(expected, TupleType) and isinstance(given, TupleType):
        firsts = zip(expected.items[:1], given.items[:1], strict=False)
        return len(expected.items) == len(given.items) and all(_agree(one, other) for one, other in firsts)
    return expected is None or given is None or isinstance(given, ScalarType) or expected == given


def _frozen(value: Any, sizes: Mapping[str, int]) -> Any:
    """An argument as a key: types in place of nodes, and the type of each literal, as 1, True and 1.0 are equal."""
    if isinstance(value, fx.Node):
        kind = type_of(value)
        if isinstance(kind, ScalarType) and kind.kind == "int":
            return int, _size(kind.value, sizes)
        if not isinstance(kind, TensorType):
            raise _UnknownError
        return _bound(kind, sizes)
    if isinstance(value, list | tuple):
        return list, tuple(_frozen(item, sizes) for item in value)
    if type(value) not in LITERALS:
        raise _UnknownError
    return type(value), value


def _thawed(key: Any) -> Any:
    if isinstance(key, TensorType):
        return torch.empty([int(size) for size in key.shape], dtype=key.dtype, device="meta")
    kind, value = key
    return [_thawed(item) for item in value] if kind is list else value


@lru_cache(maxsize=REMEMBERED)
def _inferred(target: OpOverload, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> ValueType | None:
    """The type that an op gives; None if it does not run on the meta device."""
    try:
        with torch.no_grad():
            value = target(*map(_thawed, args), **{name: _thawed(item) for name, item in kwargs})
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError, ArithmeticError):
        return None
    if isinstance(value, torch.Tensor) and not value.is_meta:
        return None
    return type_of_value(value)
