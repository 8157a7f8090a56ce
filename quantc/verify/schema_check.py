"""Schema check of calls: number and names of arguments, and tensors where tensors belong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.ir.dialect import Argument, arguments, target_name
from quantc.ir.types import ScalarType, TensorType, TupleType, type_of

WhyNot = Callable[[Any], str | None]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The constraints on a call of one op; computed once an op."""

    name: str
    rows: tuple[Argument, ...]
    names: frozenset[str]
    positional: int
    checks: tuple[WhyNot | None, ...]
    by_name: dict[str, WhyNot | None]
    required: tuple[tuple[int, str], ...]


@cache
def _shape(target: OpOverload) -> _Shape:
    rows = arguments(target)
    takes_numbers = torch._C._should_allow_numbers_as_tensors(target._schema.name.rpartition("::")[2])
    checks = tuple(_check(row.type, takes_numbers) for row in rows)
    return _Shape(
        target_name(target),
        rows,
        frozenset(row.aten_name for row in rows),
        sum(not row.keyword_only for row in rows),
        checks,
        {row.aten_name: check for row, check in zip(rows, checks, strict=True)},
        tuple((index, row.aten_name) for index, row in enumerate(rows) if not row.has_default),
    )


def why_not_call(node: fx.Node, target: OpOverload) -> Iterator[str]:
    """Every mismatch between a call and its schema."""
    shape, args, kwargs = _shape(target), node.args, node.kwargs
    count = len(args)
    if count > shape.positional:
        yield f"{shape.name} takes {shape.positional} arguments by position, not {count}"
    for check, value, row in zip(shape.checks, args, shape.rows, strict=False):
        if check is not None and (why := check(value)) is not None:
            yield f"argument {row.name!r} {why}"
    for name, value in kwargs.items():
        if name not in shape.names:
            yield f"{shape.name} has no argument {name!r}"
        elif (check := shape.by_name[name]) is not None and (why := check(value)) is not None:
            yield f"argument {name!r} {why}"
    for index, name in shape.required:
        if index >= count and name not in kwargs:
            yield f"the argument {shape.rows[index].name!r} is missing"
    if kwargs:
        twice = [row.name for row in shape.rows[:count] if row.aten_name in kwargs]
        yield from (f"the argument {name!r} is given twice" for name in twice)


def _check(kind: str, takes_numbers: bool) -> WhyNot | None:
    """The check for one argument type; None if any non-tensor is allowed."""
    one = _number_or_tensor if takes_numbers else _tensor
    match kind:
        case "Tensor":
            return one
        case "Optional[Tensor]":
            return lambda value: None if value is None else one(value)
        case "List[Tensor]":
            return lambda value: _tensors(value, _tensor)
        case "List[Optional[Tensor]]":
            return lambda value: _tensors(value, lambda item: None if item is None else _tensor(item))
        case _:
            return None


def _may_be_tensor(node: fx.Node) -> bool:
    """Reads `val` directly: this runs on every operand, and formatting shapes would be slow."""
    fact = node.meta.get("val")
    return fact is None or isinstance(fact, torch.Tensor | TensorType)


def _tensor(value: Any) -> str | None:
    """The reason why a value is not a tensor; a node of unknown type passes."""
    if isinstance(value, fx.Node):
        if _may_be_tensor(value):
            return None
        kind = type_of(value)
        return f"must be a tensor, and %{value.name} is {kind}" if isinstance(kind, TupleType | ScalarType) else None
    return None if isinstance(value, torch.Tensor) else f"must be a tensor, not {_brief(value)}"


def _number_or_tensor(value: Any) -> str | None:
    if not isinstance(value, fx.Node):
        return None if isinstance(value, int | float | complex) else _tensor(value)
    if _may_be_tensor(value) or isinstance(type_of(value), ScalarType):
        return None
    return _tensor(value)


def _tensors(value: Any, check: WhyNot) -> str | None:
    if isinstance(value, list | tuple):
        return next((why for item in value if (why := check(item)) is not None), None)
    if isinstance(value, fx.Node):
        kind = type_of(value)
        is_one = isinstance(kind, TensorType | ScalarType)
        return f"must be a list of tensors, and %{value.name} is {kind}" if is_one else None
    return f"must be a list of tensors, not {_brief(value)}"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
