"""Legalization of partial reads for XNNPACK."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import fx

from quantc.ir.dialect import argument, is_op, op_name
from quantc.ir.program import Program, Stage
from quantc.ir.types import TensorType, tensor_type
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.targets.executorch.view_ops import Mover, reshape_sizes

aten = torch.ops.aten

ONE_PLACE = ("select", "unbind")
"""Ops whose results lack the axis that was cut."""
PARTS = ("split", "split_sizes", "chunk", "unbind")
"""Ops with several results."""
CUTS = ("select", "narrow", *PARTS)


class LegalizeSlices(Pass):
    """Write partial reads as `slice`, the one that XNNPACK knows: `select`, `narrow`, `split`, `chunk` and `unbind`.

    Each part becomes a slice, and a reshape where the axis goes. A slice of dequantized numbers that loses an axis is
    quantized and dequantized again on the same grid, so that the delegate moves levels. A read stays as it is along an
    axis whose size varies, or where two others do.
    """

    name: ClassVar[str] = "legalize-slices"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        found = [node for node in program.nodes() if is_cut(node)]
        written = sum(replace_by_slices(program, node) for node in found)
        return Outcome(written > 0, (f"{written} written as slices",) if written else ())


def is_cut(node: fx.Node) -> bool:
    """True if a node takes parts of a tensor along an axis of static size; at most one other axis is dynamic."""
    if not is_op(node, *CUTS) or len(node.all_input_nodes) != 1:  # where it cuts may depend on a size
        return False
    kind = tensor_type(node.all_input_nodes[0])
    if kind is None or kind.rank == 1 or sum(isinstance(size, str) for size in kind.shape) > 1:
        return False
    size = kind.shape[_axis(node, kind)]
    return isinstance(size, int) and size > 0


def replace_by_slices(program: Program, node: fx.Node) -> bool:
    """Replace each part by a slice, if the types of all are known; whether that was done."""
    items = list(node.users) if op_name(node) in PARTS else [node]
    if tensor_type(node.all_input_nodes[0]) is None or any(tensor_type(item) is None for item in items):
        return False
    found = list(_ends(node))
    if op_name(node) not in PARTS:
        _slice(program, node, node, found[0])
        return True
    read = [item.args[1] for item in items if item.target is operator.getitem]
    places = [place for place in read if isinstance(place, int)]
    if len(places) < len(items):
        return False
    for item, place in zip(items, places, strict=True):
        _slice(program, node, item, found[place])
    program.erase(node)
    return True


def _slice(program: Program, node: fx.Node, item: fx.Node, ends: tuple[int, int]) -> None:
    """`item` is what becomes a slice: the node, or one of its results."""
    x, kind = node.all_input_nodes[0], tensor_type(item)
    whole = tensor_type(x)
    if kind is None or whole is None:
        return
    axis = _axis(node, whole)
    shape = (*whole.shape[:axis], ends[1] - ends[0], *whole.shape[axis + 1 :])
    mover = Mover(program, item, node.name)
    cut = TensorType(kind.dtype, shape)
    if op_name(node) in ONE_PLACE:
        made = mover.move(x, aten.slice.Tensor, (axis, *ends), cut)
        made = mover.emit(aten.reshape.default, (made, reshape_sizes(kind.shape)), kind)
    else:
        made = mover.emit(aten.slice.Tensor, (x, axis, *ends), cut)
    program.replace(item, made)


def _axis(node: fx.Node, whole: TensorType) -> int:
    return int(argument(node, "dim")) % whole.rank


def _ends(node: fx.Node) -> Iterator[tuple[int, int]]:
    """Start and end of each part."""
    whole = tensor_type(node.all_input_nodes[0])
    if whole is None:
        return
    size = int(whole.shape[_axis(node, whole)])
    match op_name(node):
        case "select":
            start = int(argument(node, "index")) % size
            yield start, start + 1
        case "narrow":
            start = int(argument(node, "start")) % size
            yield start, start + int(argument(node, "length"))
        case "split_sizes":
            yield from pairwise(accumulate((int(each) for each in argument(node, "split_sizes")), initial=0))
        case "split":
            yield from _steps(size, int(argument(node, "split_size")))
        case "chunk":
            yield from _steps(size, math.ceil(size / int(argument(node, "chunks"))))
        case _:
            yield from _steps(size, 1)


def _steps(size: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, step):
        yield start, min(start + step, size)
