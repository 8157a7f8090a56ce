"""ONNX writers of reductions and norms."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from quantc.targets.onnx.op_writers import OpCall, Value, along_an_axis, writes

REDUCTIONS = {"mean": "ReduceMean", "sum": "ReduceSum", "amax": "ReduceMax", "amin": "ReduceMin"}


def _reduce(op: str, call: OpCall) -> Value:
    axes = call.axes_or_all(call["dim"])
    x = call.tensor("x", call.result.dtype)
    if op == "ReduceMean" and call.rank() == 4 and sorted(axes) == [2, 3]:
        pooled = call.emit("GlobalAveragePool", x)  # runtimes have integer kernels for it
        return pooled if call["keepdim"] else call.emit("Squeeze", pooled, call.writer.numbers([2, 3]))
    return call.emit(op, x, call.writer.numbers(axes), keepdims=int(call["keepdim"]))


for name, op in REDUCTIONS.items():
    writes(name)(along_an_axis(partial(_reduce, op)))


@writes("aten.sum.default", "aten.mean.default", "aten.amax.default")
def total(call: OpCall) -> Value:
    op = REDUCTIONS[str(call.node.target).split(".")[1]]
    return call.emit(op, call.read(call.node.args[0], call.result.dtype), keepdims=0)


@writes("max", "min")
@along_an_axis
def extreme(call: OpCall) -> Value:
    """Extreme value and its index."""
    name = "Max" if "max" in str(call.node.target) else "Min"
    axis, kept, x = call.axis(call["dim"]), int(call["keepdim"]), call.tensor("x")
    value = call.emit(f"Reduce{name}", x, call.writer.numbers([axis]), keepdims=kept)
    return value, call.emit(f"Arg{name}", x, axis=axis, keepdims=kept)


@writes("aten.argmax.default", "aten.argmin.default")
@along_an_axis
def place(call: OpCall) -> Value:
    op = "ArgMax" if "argmax" in str(call.node.target) else "ArgMin"
    x = call.read(call.node.args[0])
    if call["dim"] is None:
        found = call.emit(op, call.emit("Reshape", x, call.writer.numbers([-1])), axis=0, keepdims=0)
        return call.emit("Reshape", found, call.writer.numbers([1] * call.result.rank)) if call["keepdim"] else found
    return call.emit(op, x, axis=int(call["dim"]), keepdims=int(call["keepdim"]))


@writes("topk")
@along_an_axis
def topk(call: OpCall) -> Value:
    inputs = [call.tensor("x"), call.number(call["k"])]
    largest, ordered = int(call["largest"]), int(call["sorted"])
    return call.many("TopK", inputs, 2, axis=int(call["dim"]), largest=largest, sorted=ordered)


@writes("aten.cumsum.default")
@along_an_axis
def cumsum(call: OpCall) -> Value:
    source, axis = call.node.args[:2]
    return call.emit("CumSum", call.read(source, call.result.dtype), call.writer.scalar(int(axis), torch.int64))  # type: ignore[arg-type]


@writes("aten.any.dim", "aten.any.default", "aten.any.dims")
@along_an_axis
def anywhere(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    given = call.node.args[1] if len(call.node.args) > 1 else None
    kept = int(bool(call.node.args[2])) if len(call.node.args) > 2 else 0
    axes = call.writer.numbers(call.axes_or_all(given, call.type(source).rank))
    wide = call.writer.cast(call.read(source, torch.bool), torch.int32)
    return call.writer.cast(call.emit("ReduceMax", wide, axes, keepdims=kept), torch.bool)


# -- norms ---------------------------------------------------------------------------------------------------------


@writes("batch_norm")
def batch_norm(call: OpCall) -> Value:
    if call["training"]:
        raise call.refuse(f"{call.node.name} is in training mode")
    channels = int(call.type(call["x"]).shape[1])
    ones, zeros = torch.ones(channels), torch.zeros(channels)
    w = call.writer.constant(ones) if call["w"] is None else call.tensor("w")
    b = call.writer.constant(zeros) if call["b"] is None else call.tensor("b")
    inputs = (call.tensor("x"), w, b, call.tensor("mean"), call.tensor("var"))
    return call.emit("BatchNormalization", *inputs, epsilon=float(call["eps"]))


@writes("layer_norm")
def layer_norm(call: OpCall) -> Value:
    shape = [int(size) for size in call["normalized_shape"]]
    w = call.writer.constant(torch.ones(shape)) if call["w"] is None else call.tensor("w")
    bias = () if call["b"] is None else (call.tensor("b"),)
    eps = float(call["eps"])
    return call.emit("LayerNormalization", call.tensor("x"), w, *bias, axis=-len(shape), epsilon=eps)


@writes("rms_norm")
def rms_norm(call: OpCall) -> Value:
    x, dtype = call.tensor("x"), call.result.dtype
    eps = call["eps"] if call["eps"] is not None else torch.finfo(dtype).eps
    axes = call.writer.numbers([-1 - index for index in range(len(call["normalized_shape"]))])
    square = call.emit("ReduceMean", call.emit("Mul", x, x), axes, keepdims=1)
    root = call.emit("Sqrt", call.emit("Add", square, call.writer.scalar(float(eps), dtype)))
    normal = call.emit("Div", x, root)
    return normal if call["w"] is None else call.emit("Mul", normal, call.tensor("w"))


@writes("group_norm", "instance_norm")
def group_norm(call: OpCall) -> Value:
    """Each group is a channel of InstanceNormalization, which every runtime supports."""
    kind = call.type(call["x"])
    channels, rank = int(kind.shape[1]), kind.rank
    is_group = "group" in str(call.node.target)
    if not is_group and not call["use_input_stats"]:
        raise call.refuse(f"{call.node.name} uses running statistics")
    groups = int(call["num_groups"]) if is_group else channels
    x = call.tensor("x")
    parts = call.emit("Reshape", x, call.writer.numbers([0, groups, -1]))
    ones, zeros = (call.writer.constant(maker(groups)) for maker in (torch.ones, torch.zeros))
    normal = call.emit("InstanceNormalization", parts, ones, zeros, epsilon=float(call["eps"]))
    made = call.emit("Reshape", normal, call.shape_of(call["x"]))
    along = call.writer.numbers([1, -1, *[1] * (rank - 2)])
    if call["w"] is not None:
        made = call.emit("Mul", made, call.emit("Reshape", call.tensor("w"), along))
    return made if call["b"] is None else call.emit("Add", made, call.emit("Reshape", call.tensor("b"), along))


@writes("aten.var.correction")
@along_an_axis
def variance(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    kind = call.type(source)
    axes = call.axes_or_all(call["dim"], kind.rank)
    sizes = [kind.shape[axis] for axis in axes] if kind.rank else []
    correction = 1 if call["correction"] is None else call["correction"]
    x, along = call.read(source), call.writer.numbers(axes)
    off = call.emit("Sub", x, call.emit("ReduceMean", x, along, keepdims=1))
    summed = call.emit("ReduceSum", call.emit("Mul", off, off), along, keepdims=int(call["keepdim"]))
    if all(isinstance(size, int) for size in sizes):
        count = max(prod(int(size) for size in sizes) - correction, 0)
        return call.emit("Div", summed, call.writer.scalar(float(count), kind.dtype))
    found = call.emit("ReduceProd", call.emit("Gather", call.emit("Shape", x), along), keepdims=0)
    number = partial(call.writer.scalar, dtype=kind.dtype)
    less = call.emit("Sub", call.writer.cast(found, kind.dtype), number(float(correction)))
    return call.emit("Div", summed, call.emit("Max", less, number(0.0)))
