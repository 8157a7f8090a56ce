"""Literals in dump text: the syntax of every value that fx accepts as an argument.

`quantc.text.lexer` parses them. Every kind has one spelling, so equal text means equal value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from quantc.ir.types import DTYPE_NAMES, type_of_value
from quantc.text.target_names import callee_name

Refer = Callable[[fx.Node], str]


@dataclass(frozen=True, slots=True)
class Opaque:
    """Placeholder, in a parsed Program, for a value that text cannot represent. `kind` describes it."""

    kind: str


def no_nodes(node: fx.Node) -> str:
    """`refer` for values without nodes; a node prints under its name."""
    return f"%{node.name}"


def quote(text: str) -> str:
    """A string literal; ASCII only, so that no character can be taken for a line break."""
    return json.dumps(text)


def _complex(value: complex) -> str:
    return f"complex({float(value.real)!r}, {float(value.imag)!r})"


def _dtype(value: torch.dtype) -> str:
    return DTYPE_NAMES.get(value, str(value))


def _device(value: torch.device) -> str:
    return f"device({quote(str(value))})"


def _constant_text(value: object) -> str:
    return str(value)


ATOMS: dict[type, Callable[[Any], str]] = {
    bool: _constant_text,
    int: _constant_text,
    type(None): _constant_text,
    float: repr,
    complex: _complex,
    str: quote,
    EllipsisType: lambda _: "...",
    torch.dtype: _dtype,
    torch.device: _device,
    torch.layout: _constant_text,
    torch.memory_format: _constant_text,
    Opaque: lambda value: f"opaque({quote(value.kind)})",
}


def format_value(value: Any, refer: Refer) -> str:
    """The text of a literal; nodes inside it are written by `refer`."""
    if isinstance(value, fx.Node):
        return refer(value)
    atom = ATOMS.get(type(value))
    if atom is not None:
        return atom(value)
    if isinstance(value, list):
        return f"[{', '.join([format_value(item, refer) for item in value])}]"
    if isinstance(value, tuple):
        items = [format_value(item, refer) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(value, dict):
        rows = [f"{format_value(key, refer)}: {format_value(item, refer)}" for key, item in value.items()]
        return f"{{{', '.join(rows)}}}"
    if isinstance(value, slice | range):
        parts = [format_value(part, refer) for part in (value.start, value.stop, value.step)]
        return f"{type(value).__name__}({', '.join(parts)})"
    return _unusual(value)


def _unusual(value: Any) -> str:
    if isinstance(value, OpOverload | HigherOrderOperator):
        return f"&{callee_name(value)}"
    # numpy scalars, IntEnum and the like print as plain numbers
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, complex):
        return _complex(complex(value))
    if isinstance(value, str):
        return quote(str(value))
    return f"opaque({quote(_kind(value))})"


def _kind(value: Any) -> str:
    """A description of an unprintable value, without addresses: the text must be the same in every run."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    kind = type_of_value(value)
    return name if kind is None else f"{name} {kind}"


def used_nodes(value: Any) -> Iterator[fx.Node]:
    """Every node in an argument, in order, with repetitions. Iterative: values may nest."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, fx.Node):
            yield item
        elif isinstance(item, tuple | list):
            pending.extend(reversed(item))
        elif isinstance(item, dict):
            pending.extend(reversed(list(item.values())))
        elif isinstance(item, slice):
            pending.extend((item.step, item.stop, item.start))
