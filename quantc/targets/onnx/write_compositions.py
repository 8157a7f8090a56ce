"""ONNX writers of ops without a counterpart: composed of several."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from quantc.targets.onnx.op_writers import OpCall, Value, along_an_axis, writes
from quantc.targets.onnx.write_reductions import variance


def _either(op: str, call: OpCall) -> Value:
    left, right = (call.read(given, call.result.dtype) for given in call.node.args[:2])
    return call.emit(op, left, right)


writes("aten.max.other")(partial(_either, "Max"))
writes("aten.min.other")(partial(_either, "Min"))
writes("aten.pow.Scalar")(partial(_either, "Pow"))


def _over_all(op: str, call: OpCall) -> Value:
    return call.emit(op, call.read(call.node.args[0]), keepdims=0)


writes("aten.max.default")(partial(_over_all, "ReduceMax"))
writes("aten.min.default")(partial(_over_all, "ReduceMin"))
writes("aten.prod.default")(partial(_over_all, "ReduceProd"))


@writes("aten.prod.dim_int")
@along_an_axis
def prod(call: OpCall) -> Value:
    source, axis = call.node.args[:2]
    axes = call.writer.numbers([call.axis(axis, call.type(source).rank)])  # type: ignore[arg-type]
    return call.emit("ReduceProd", call.read(source, call.result.dtype), axes, keepdims=int(call["keepdim"]))


@writes("aten.logsumexp.default")
@along_an_axis
def logsumexp(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    axes = call.writer.numbers(call.axes_or_all(call["dim"], call.type(source).rank))
    return call.emit("ReduceLogSumExp", call.read(source), axes, keepdims=int(call["keepdim"]))


@writes("aten.std.correction")
def deviation(call: OpCall) -> Value:
    return call.emit("Sqrt", str(variance(call)))


@writes("aten.linalg_vector_norm.default")
@along_an_axis
def vector_norm(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    order, dtype = float(call["ord"]), call.result.dtype
    along = {"keepdims": int(call["keepdim"])}
    axes = call.writer.numbers(call.axes_or_all(call["dim"], call.type(source).rank))
    x = call.read(source, dtype)
    if order in (1, 2):
        return call.emit("ReduceL1" if order == 1 else "ReduceL2", x, axes, **along)
    if order == 0:
        is_zero = call.emit("Equal", x, call.writer.scalar(0.0, dtype))
        return call.emit("ReduceSum", call.writer.cast(call.emit("Not", is_zero), dtype), axes, **along)
    size = call.emit("Abs", x)
    if math.isinf(order):
        return call.emit("ReduceMax" if order > 0 else "ReduceMin", size, axes, **along)
    powers = call.emit("Pow", size, call.writer.scalar(order, dtype))
    return call.emit("Pow", call.emit("ReduceSum", powers, axes, **along), call.writer.scalar(1 / order, dtype))


@writes("aten.cosine_similarity.default")
def cosine_similarity(call: OpCall) -> Value:
    """Each norm is clamped separately."""
    dtype, left, right = call.result.dtype, *call.node.args[:2]
    axes = call.writer.numbers([int(call["dim"])])
    eps = call.writer.scalar(float(call["eps"]), dtype)
    operands, parts = [call.read(given, dtype) for given in (left, right)], []
    if call.type(left).shape != call.type(right).shape:
        together = call.emit("Shape", call.emit("Add", *operands))
        operands = [call.emit("Expand", x, together) for x in operands]
    for x in operands:
        length = call.emit("ReduceL2", x, axes, keepdims=1)
        parts.append(call.emit("Div", x, call.emit("Max", length, eps)))
    return call.emit("ReduceSum", call.emit("Mul", *parts), axes, keepdims=0)


@writes("aten.log_sigmoid.default")
def log_sigmoid(call: OpCall) -> Value:
    return call.emit("Neg", call.emit("Softplus", call.emit("Neg", call.read(call.node.args[0]))))


@writes("aten.threshold.default")
def threshold(call: OpCall) -> Value:
    source, bound, value = call.node.args[:3]
    dtype = call.result.dtype
    x = call.read(source, dtype)
    return call.emit("Where", call.emit("Greater", x, call.read(bound, dtype)), x, call.read(value, dtype))


@writes("aten.addcmul.default", "aten.addcdiv.default")
def addcmul(call: OpCall) -> Value:
    x, left, right = (call.read(given, call.result.dtype) for given in call.node.args[:3])
    made = call.emit("Mul" if "addcmul" in str(call.node.target) else "Div", left, right)
    if call["value"] != 1:
        made = call.emit("Mul", made, call.writer.scalar(call["value"], call.result.dtype))
    return call.emit("Add", x, made)


@writes("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(call: OpCall) -> Value:
    start, end, weight = (call.read(given, call.result.dtype) for given in call.node.args[:3])
    return call.emit("Add", start, call.emit("Mul", call.emit("Sub", end, start), weight))


@writes("aten.outer.default")
def outer(call: OpCall) -> Value:
    left, right = (call.read(given, call.result.dtype) for given in call.node.args[:2])
    return call.emit("Mul", call.emit("Unsqueeze", left, call.writer.numbers([1])), right)


@writes("aten.tile.default")
def tile(call: OpCall) -> Value:
    source, counts = call.node.args[:2]
    given, rank = list(counts), call.type(source).rank  # type: ignore[arg-type]
    given = [1] * (rank - len(given)) + given
    x = call.read(source)
    if len(given) > rank:
        x = call.emit("Unsqueeze", x, call.writer.numbers(range(len(given) - rank)))
    return call.emit("Tile", x, call.sizes(given))


@writes("aten.one_hot.default")
def one_hot(call: OpCall) -> Value:
    source, count = call.node.args[:2]
    if not isinstance(count, int) or count < 0:
        raise call.refuse(f"how many classes {call.node.name} has depends on its input")
    values = call.writer.constant(torch.tensor([0, 1]), "off_and_on")
    indices, classes = call.read(source), call.writer.scalar(count, torch.int64)
    if call.type(source).rank:
        return call.emit("OneHot", indices, classes, values, axis=-1)
    rows = call.emit("OneHot", call.emit("Reshape", indices, call.writer.numbers([1])), classes, values, axis=-1)
    return call.emit("Reshape", rows, call.writer.numbers([-1]))


@writes("aten.sort.default", "aten.argsort.default")
@along_an_axis
def sort(call: OpCall) -> Value:
    source: Any = call.node.args[0]
    axis, x = call.axis(call["dim"], call.type(source).rank), call.read(source)
    largest = int(bool(call["descending"]))
    made = call.many("TopK", [x, call.size(x, axis)], 2, axis=axis, largest=largest, sorted=1)
    return made[1] if "argsort" in str(call.node.target) else made
