"""ONNX writers of indexing and of tensor creation."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from quantc.targets.onnx.op_writers import OpCall, Value, writes
from quantc.targets.onnx.write_moves import FAR


@writes("select")
def select(call: OpCall) -> Value:
    axis, index = call.axis(call["dim"]), call["index"]
    x = call.tensor("x")
    if isinstance(index, fx.Node):
        return call.emit("Squeeze", call.emit("Gather", x, call.read(index), axis=axis), call.writer.numbers([axis]))
    return call.emit("Gather", x, call.writer.scalar(index, torch.int64), axis=axis)


@writes("slice")
def slice_axis(call: OpCall) -> Value:
    start = 0 if call["start"] is None else call["start"]
    end = FAR if call["end"] is None else call["end"]
    if (start, end, call["step"]) == (0, FAR, 1):
        return call.tensor("x")
    axis = call.writer.numbers([call.axis(call["dim"])])
    return call.emit("Slice", call.tensor("x"), call.number(start), call.number(end), axis, call.number(call["step"]))


@writes("narrow")
def narrow(call: OpCall) -> Value:
    start, length = call["start"], call["length"]
    axis = call.writer.numbers([call.axis(call["dim"])])
    first = call.number(start)
    if isinstance(start, int) and isinstance(length, int):
        end = FAR if start < 0 and start + length == 0 else start + length
        return call.emit("Slice", call.tensor("x"), first, call.number(end), axis)
    return call.emit("Slice", call.tensor("x"), first, call.emit("Add", first, call.number(length)), axis)


@writes("index_select")
def index_select(call: OpCall) -> Value:
    index = call.tensor("index")
    if not call.rank("index"):
        index = call.emit("Reshape", index, call.writer.numbers([1]))
    return call.emit("Gather", call.tensor("x"), index, axis=call.axis(call["dim"]))


@writes("gather")
def gather(call: OpCall) -> Value:
    if not call.rank():
        return call.emit("Expand", call.tensor("x"), call.shape_of(call["index"]))
    return call.emit("GatherElements", call.tensor("x"), call.tensor("index"), axis=call.axis(call["dim"]))


@writes("index")
def index(call: OpCall) -> Value:
    """Indexing by one or several tensors. Indexed axes that are not adjacent move to the front."""
    given = list(call["indices"])
    axes = [axis for axis, each in enumerate(given) if each is not None]
    kinds = [call.type(given[axis]) for axis in axes]
    if any(kind.dtype is torch.bool for kind in kinds):
        raise call.refuse(f"{call.node.name} is indexed by a mask")
    if len(axes) == 1:
        return call.emit("Gather", call.tensor("x"), call.read(given[axes[0]]), axis=axes[0])
    parts = [call.read(given[axis], torch.int64) for axis in axes]
    shape = call.emit("Shape", _broadcast_sum(call, parts))
    last = call.writer.numbers([-1])
    spread = [call.emit("Unsqueeze", call.emit("Expand", part, shape), last) for part in parts]
    together = call.emit("Concat", *spread, axis=-1)
    x, rank = call.tensor("x"), call.rank()
    if axes == list(range(len(axes))):
        return call.emit("GatherND", x, together)
    front, wide = axes[0], max(kind.rank for kind in kinds)
    order = [*axes, *(axis for axis in range(rank) if axis not in axes)]
    found = call.emit("GatherND", call.emit("Transpose", x, perm=order), together)
    if axes != list(range(front, front + len(axes))):
        return found
    back = [*range(wide, wide + front), *range(wide), *range(wide + front, call.result.rank)]
    return call.emit("Transpose", found, perm=back)


def _broadcast_sum(call: OpCall, parts: list[str]) -> str:
    """Something of the shape that tensors have together."""
    total = parts[0]
    for part in parts[1:]:
        total = call.emit("Add", total, part)
    return total


# -- made from nothing ---------------------------------------------------------------------------------------------

FILLS = {"zeros": 0, "ones": 1, "zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}


def _fill(call: OpCall, number: Any, shape: str) -> str:
    return call.emit("Expand", call.read(number, call.result.dtype), shape)


@writes("aten.full.default")
def full(call: OpCall) -> Value:
    return _fill(call, call.node.args[1], call.sizes(list(call.node.args[0])))  # type: ignore[arg-type]


@writes("aten.zeros.default", "aten.ones.default")
def zeros(call: OpCall) -> Value:
    number = FILLS[str(call.node.target).split(".")[1]]
    return _fill(call, number, call.sizes(list(call.node.args[0])))  # type: ignore[arg-type]


@writes("aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default")
def zeros_like(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    number = FILLS.get(str(call.node.target).split(".")[1], call.node.args[1] if len(call.node.args) > 1 else 0)
    return _fill(call, number, call.shape_of(source))


@writes("aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default")
def new_zeros(call: OpCall) -> Value:
    number = FILLS.get(str(call.node.target).split(".")[1], call.node.args[2] if len(call.node.args) > 2 else 0)
    return _fill(call, number, call.sizes(list(call.node.args[1])))  # type: ignore[arg-type]


@writes("aten.scalar_tensor.default")
def scalar_tensor(call: OpCall) -> Value:
    return call.read(call.node.args[0], call.result.dtype)


@writes("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(call: OpCall) -> Value:
    given: list[Any] = list(call.node.args)
    start, end, step = {1: [0, *given, 1], 2: [*given, 1], 3: given}[len(given)]
    dtype = call.result.dtype
    if not any(isinstance(each, fx.Node) for each in (start, end, step)):
        return call.writer.constant(
            torch.arange(start, end, step, dtype=dtype)
        )  # ONNX counts steps of floats in float32
    none = call.writer.numbers([])
    ends = [call.emit("Reshape", call.read(each, dtype), none) for each in (start, end, step)]
    return call.emit("Range", *ends)


@writes("aten.tril.default", "aten.triu.default")
def triangle(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    offset = call.node.args[1] if len(call.node.args) > 1 else 0
    is_bool = call.result.dtype is torch.bool
    kept = call.read(source, torch.float32 if is_bool else None)
    upper = int("triu" in str(call.node.target))
    made = call.emit("Trilu", kept, call.writer.scalar(int(offset), torch.int64), upper=upper)  # type: ignore[arg-type]
    return call.writer.cast(made, torch.bool) if is_bool else made
