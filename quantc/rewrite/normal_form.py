"""Normal form of a call: arguments in schema order, defaults omitted, lone numbers widened, non-negative dims."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.ir.dialect import Argument, arguments, aten
from quantc.ir.types import dtype_of, rank_of

DIMS = frozenset({"dim", "dim0", "dim1", "dims", "start_dim", "end_dim"})
ADDS_A_DIM = frozenset({aten.unsqueeze.default, aten.stack.default})
STRIDE_IS_KERNEL = frozenset(getattr(aten, f"{kind}_pool{n}d").default for kind in ("max", "avg") for n in (1, 2, 3))
"""Pools whose stride, if empty, is the kernel size."""
NUMBERS_LIKE_TENSOR = frozenset({aten.clamp.default, aten.fill_.Scalar, aten.fill.Scalar, aten.masked_fill.Scalar})
"""Ops whose numbers take the dtype of the tensor: on a float tensor they are floats."""
IRRELEVANT_KEYWORDS: dict[str, tuple[Any, ...]] = {
    "pin_memory": (False, None),
    "layout": (torch.strided, None),
    "device": (torch.device("cpu"), None),
}
"""Keywords of tensor factories with values that are the default behaviour anyway."""


@cache
def _rows(target: OpOverload) -> tuple[tuple[Argument, ...], tuple[Argument, ...], dict[str, int]]:
    rows = arguments(target)
    positional = tuple(row for row in rows if not row.keyword_only)
    return (
        positional,
        tuple(row for row in rows if row.keyword_only),
        {row.aten_name: i for i, row in enumerate(positional)},
    )


def normalize(node: fx.Node) -> bool:
    """Normalize a call of an ATen op; True if that changed it."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    positional, _, places = _rows(target)
    values: list[Any] = list(node.args)
    keywords = dict(node.kwargs)
    if keywords and any(name in places for name in keywords):
        last = max(places[name] for name in keywords if name in places)
        values += [row.default for row in positional[len(values) : last + 1]]
        for name in [name for name in keywords if name in places]:
            values[places[name]] = keywords.pop(name)
    rank = _first_rank(values)
    values = [_value(target, row, value, rank) for row, value in zip(positional, values, strict=False)]
    _fill_stride(target, values)
    if target in NUMBERS_LIKE_TENSOR:
        _float_numbers(values)
    limit = None if rank is None else rank + 1 if target in ADDS_A_DIM else rank
    while values and len(values) <= len(positional) and _is_default(positional[len(values) - 1], values[-1], limit):
        values.pop()
    keywords = {name: value for name, value in keywords.items() if not _is_idle(target, name, value)}
    if _same(values, node.args) and keywords == node.kwargs:
        return False
    node.args = tuple(values)
    node.kwargs = keywords
    return True


def _same(left: list[Any], right: tuple[Any, ...]) -> bool:
    """Equality that distinguishes 1, 1.0 and True, as the dump does."""
    return len(left) == len(right) and all(map(_identical, left, right))


def _identical(left: Any, right: Any) -> bool:
    if isinstance(left, list | tuple):
        return isinstance(right, list) and len(left) == len(right) and all(map(_identical, left, right))
    return type(left) is type(right) and (left is right or left == right)


def _first_rank(values: list[Any]) -> int | None:
    for value in values[:2]:
        if isinstance(value, list | tuple) and value:
            value = value[0]
        if isinstance(value, fx.Node):
            return rank_of(value)
    return None


def _value(target: OpOverload, row: Argument, value: Any, rank: int | None) -> Any:
    if value is None or isinstance(value, fx.Node):
        return value if row.width is None or value is None or "List" not in row.type else _lone(row, value)
    if row.width is not None and isinstance(value, int):
        value = [value] * row.width
    if isinstance(value, tuple):
        value = list(value)
    if row.type == "float" and type(value) is int:
        value = float(value)
    if "List[float]" in row.type:
        value = [float(item) if type(item) is int else item for item in value]
    if rank is not None and row.aten_name in DIMS:
        limit = rank + 1 if target in ADDS_A_DIM else rank
        value = _from_zero(value, limit)
    return value


def _lone(row: Argument, value: fx.Node) -> Any:
    """A symbolic number given for a whole list; a node that is itself a shape is left."""
    kind = value.meta.get("val")
    return [value] * (row.width or 1) if getattr(kind, "kind", None) == "int" else value


def _from_zero(value: Any, rank: int) -> Any:
    if isinstance(value, list):
        return [_from_zero(item, rank) for item in value]
    return value + rank if isinstance(value, int) and value < 0 <= value + rank else value


def _fill_stride(target: OpOverload, values: list[Any]) -> None:
    if target not in STRIDE_IS_KERNEL or len(values) < 2:
        return
    if len(values) == 2:
        values.append(list(values[1]))
    elif not values[2]:
        values[2] = list(values[1])


def _float_numbers(values: list[Any]) -> None:
    dtype = dtype_of(values[0])
    if dtype is None or not dtype.is_floating_point:
        return
    for index in range(1, len(values)):
        if type(values[index]) is int:
            values[index] = float(values[index])


def _is_default(row: Argument, value: Any, rank: int | None = None) -> bool:
    if not row.has_default or isinstance(value, fx.Node):
        return False
    if isinstance(value, list) and any(isinstance(item, fx.Node) for item in value):
        return False
    if rank is not None and row.aten_name in DIMS and value is not None:
        return bool(_from_zero(row.default, rank) == value)
    return bool(value == row.default) and isinstance(value, bool) == isinstance(row.default, bool)


def _is_idle(target: OpOverload, name: str, value: Any) -> bool:
    if name in IRRELEVANT_KEYWORDS and not isinstance(value, fx.Node) and value in IRRELEVANT_KEYWORDS[name]:
        return True
    rows: tuple[Argument, ...] = _rows(target)[1]
    return any(row.aten_name == name and _is_default(row, value) for row in rows)


def is_item(node: fx.Node, index: int) -> bool:
    """True if a node is output `index` of a node with several outputs."""
    return node.target is operator.getitem and bool(node.args[1] == index)
