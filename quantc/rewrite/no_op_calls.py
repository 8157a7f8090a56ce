"""Calls that are the identity: casts to the same type, reshapes to the same shape, …

Each function handles one op: the operand the node is equal to, or None. Removal also depends on in-place writes: see
`quantc.ir.alias_analysis`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.ir.dialect import argument, aten
from quantc.ir.types import dtype_of, is_empty, rank_of, tensor_type

END = 9223372036854775807
"""ATen's encoding of "to the end" of a slice."""


class ResultMemory(Enum):
    """Relation of an identity's result to its operand's memory."""

    SHARED = "the operand itself or a view of it"
    OWN = "a copy"
    EITHER = "the operand itself, or a copy where its layout is another"


Identity = Callable[[fx.Node], fx.Node | None]


def _operand(node: fx.Node) -> fx.Node | None:
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _default_format(node: fx.Node) -> bool:
    given = node.kwargs.get("memory_format")
    return given in (None, torch.contiguous_format, torch.preserve_format)


def _unless_layout(node: fx.Node) -> fx.Node | None:
    return _operand(node) if _default_format(node) else None


def _same_type(node: fx.Node) -> fx.Node | None:
    """For reshape, expand and the like: the result has the type of the operand. Equal size expressions are equal
    sizes."""
    x = _operand(node)
    before, after = tensor_type(x), tensor_type(node)
    return x if before is not None and before == after else None


def _full_slice(node: fx.Node) -> fx.Node | None:
    start, stop, step = (argument(node, name) for name in ("start", "end", "step"))
    if step != 1:
        return None
    is_whole = start in (None, 0) and stop in (None, END)
    return _operand(node) if is_whole else _same_type(node)


def _no_repeat(node: fx.Node) -> fx.Node | None:
    counts = node.args[1]
    is_once = isinstance(counts, list | tuple) and all(count == 1 for count in counts)
    return _operand(node) if is_once and rank_of(node.args[0]) == len(counts) else None  # type: ignore[arg-type]


def _others_empty(node: fx.Node) -> fx.Node | None:
    """For cat: all but one of the parts have no elements, as an empty cache."""
    filled = [part for part in node.args[0] if not is_empty(part)]  # type: ignore[union-attr]
    found = filled[0] if len(filled) == 1 and isinstance(filled[0], fx.Node) else None
    return found if found is not None and tensor_type(found) == tensor_type(node) is not None else None


def _same_dims(node: fx.Node) -> fx.Node | None:
    return _operand(node) if node.args[1] == node.args[2] else None


def cast_dtype(node: fx.Node) -> torch.dtype | None:
    """The target dtype of a conversion that changes nothing else."""
    target = node.target
    kwargs = dict(node.kwargs)
    if not _default_format(node) or (
        (device := kwargs.get("device")) is not None and torch.device(str(device)).type != "cpu"
    ):
        return None
    if target is aten.type_as.default:
        return dtype_of(node.args[1])
    if target is aten._to_copy.default or target is aten.to.dtype_layout:
        dtype = kwargs.get("dtype")
        return dtype if isinstance(dtype, torch.dtype) else dtype_of(node.args[0])
    if target is aten.to.dtype:
        return node.args[1] if isinstance(node.args[1], torch.dtype) else None
    if target is aten.to.other:
        return dtype_of(node.args[1])
    if target is aten.to.device and torch.device(str(node.args[1])).type == "cpu":
        return node.args[2] if isinstance(node.args[2], torch.dtype) else None
    return None


def _same_dtype(node: fx.Node) -> fx.Node | None:
    dtype = cast_dtype(node)
    x = _operand(node)
    is_copy = node.target is aten.to.dtype and len(node.args) > 3 and node.args[3]
    return x if dtype is not None and not is_copy and dtype_of(x) == dtype else None


IDENTITIES: dict[Any, tuple[Identity, ResultMemory]] = {
    aten.alias.default: (_operand, ResultMemory.SHARED),
    aten.detach.default: (_operand, ResultMemory.SHARED),
    aten.positive.default: (_operand, ResultMemory.SHARED),
    aten.lift_fresh.default: (_operand, ResultMemory.SHARED),
    aten.lift_fresh_copy.default: (_operand, ResultMemory.OWN),
    aten.contiguous.default: (_unless_layout, ResultMemory.EITHER),
    aten.clone.default: (_unless_layout, ResultMemory.OWN),
    aten.reshape.default: (_same_type, ResultMemory.SHARED),
    aten.expand.default: (_same_type, ResultMemory.SHARED),
    aten.flatten.using_ints: (_same_type, ResultMemory.SHARED),
    aten.slice.Tensor: (_full_slice, ResultMemory.SHARED),
    aten.cat.default: (_others_empty, ResultMemory.OWN),
    aten.repeat.default: (_no_repeat, ResultMemory.OWN),
    aten.transpose.int: (_same_dims, ResultMemory.SHARED),
    aten.to.dtype: (_same_dtype, ResultMemory.SHARED),
    aten.to.dtype_layout: (_same_dtype, ResultMemory.SHARED),
    aten.to.other: (_same_dtype, ResultMemory.SHARED),
    aten.to.device: (_same_dtype, ResultMemory.SHARED),
    aten.type_as.default: (_same_dtype, ResultMemory.SHARED),
    aten._to_copy.default: (_same_dtype, ResultMemory.OWN),
}
CASTS: frozenset[OpOverload] = frozenset(
    {aten.to.dtype, aten.to.dtype_layout, aten.to.other, aten.to.device, aten.type_as.default, aten._to_copy.default}
)
