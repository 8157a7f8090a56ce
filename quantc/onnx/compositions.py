"""Ops that ONNX has in parts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from quantc.onnx.reductions import variance
from quantc.onnx.table import Call, Value, writes


def _either(op: str, call: Call) -> Value:
    left, right = (call.read(given, call.result.dtype) for given in call.node.args[:2])
    return call.emit(op, left, right)


writes("aten.max.other")(partial(_either, "Max"))
writes("aten.min.other")(partial(_either, "Min"))
writes("aten.pow.Scalar")(partial(_either, "Pow"))


def _over_all(op: str, call: Call) -> Value:
    return call.emit(op, call.read(call.node.args[0]), keepdims=0)


writes("aten.max.default")(partial(_over_all, "ReduceMax"))
writes("aten.min.default")(partial(_over_all, "ReduceMin"))
writes("aten.prod.default")(partial(_over_all, "ReduceProd"))


@writes("aten.prod.dim_int")
def prod(call: Call) -> Value:
    source, axis = call.node.args[:2]
    axes = call.writer.numbers([call.axis(axis, call.type(source).rank)])  # type: ignore[arg-type]
    return call.emit("ReduceProd", call.read(source, call.result.dtype), axes, keepdims=int(call["keepdim"]))


@writes("aten.logsumexp.default")
def logsumexp(call: Call) -> Value:
    source: Any = call.node.args[0]
    axes = call.writer.numbers(call.axes(call["dim"], call.type(source).rank))
    return call.emit("ReduceLogSumExp", call.read(source), axes, keepdims=int(call["keepdim"]))


@writes("aten.std.correction")
def deviation(call: Call) -> Value:
    return call.emit("Sqrt", str(variance(call)))


@writes("aten.linalg_vector_norm.default")
def vector_norm(call: Call) -> Value:
    source: Any = call.node.args[0]
    order = call["ord"]
    if order not in (1, 2):
        raise call.refuse(f"{call.node.name} is a norm of order {order}")
    axes = call.writer.numbers(call.axes(call["dim"], call.type(source).rank))
    op = "ReduceL1" if order == 1 else "ReduceL2"
    return call.emit(op, call.read(source, call.result.dtype), axes, keepdims=int(call["keepdim"]))


@writes("aten.cosine_similarity.default")
def cosine_similarity(call: Call) -> Value:
    """The lengths are clamped, each by itself."""
    dtype, left, right = call.result.dtype, *call.node.args[:2]
    axes = call.writer.numbers([int(call["dim"])])
    eps = call.writer.scalar(float(call["eps"]), dtype)
    parts = []
    for given in (left, right):
        x = call.read(given, dtype)
        length = call.emit("ReduceL2", x, axes, keepdims=1)
        parts.append(call.emit("Div", x, call.emit("Max", length, eps)))
    return call.emit("ReduceSum", call.emit("Mul", *parts), axes, keepdims=0)


@writes("aten.log_sigmoid.default")
def log_sigmoid(call: Call) -> Value:
    return call.emit("Neg", call.emit("Softplus", call.emit("Neg", call.read(call.node.args[0]))))


@writes("aten.threshold.default")
def threshold(call: Call) -> Value:
    source, bound, value = call.node.args[:3]
    dtype = call.result.dtype
    x = call.read(source, dtype)
    return call.emit("Where", call.emit("Greater", x, call.read(bound, dtype)), x, call.read(value, dtype))


@writes("aten.addcmul.default", "aten.addcdiv.default")
def addcmul(call: Call) -> Value:
    x, left, right = (call.read(given, call.result.dtype) for given in call.node.args[:3])
    made = call.emit("Mul" if "addcmul" in str(call.node.target) else "Div", left, right)
    if call["value"] != 1:
        made = call.emit("Mul", made, call.writer.scalar(call["value"], call.result.dtype))
    return call.emit("Add", x, made)


@writes("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(call: Call) -> Value:
    start, end, weight = (call.read(given, call.result.dtype) for given in call.node.args[:3])
    return call.emit("Add", start, call.emit("Mul", call.emit("Sub", end, start), weight))


@writes("aten.outer.default")
def outer(call: Call) -> Value:
    left, right = (call.read(given, call.result.dtype) for given in call.node.args[:2])
    return call.emit("Mul", call.emit("Unsqueeze", left, call.writer.numbers([1])), right)


@writes("aten.tile.default")
def tile(call: Call) -> Value:
    source, counts = call.node.args[:2]
    given, rank = list(counts), call.type(source).rank  # type: ignore[arg-type]
    given = [1] * (rank - len(given)) + given
    x = call.read(source)
    if len(given) > rank:
        x = call.emit("Unsqueeze", x, call.writer.numbers(range(len(given) - rank)))
    return call.emit("Tile", x, call.sizes(given))


@writes("aten.one_hot.default")
def one_hot(call: Call) -> Value:
    source, count = call.node.args[:2]
    if not isinstance(count, int) or count < 0:
        raise call.refuse(f"how many classes {call.node.name} has depends on its input")
    values = call.writer.constant(torch.tensor([0, 1]), "off_and_on")
    return call.emit("OneHot", call.read(source), call.writer.scalar(count, torch.int64), values, axis=-1)


@writes("aten.sort.default", "aten.argsort.default")
def sort(call: Call) -> Value:
    source: Any = call.node.args[0]
    axis, x = call.axis(call["dim"], call.type(source).rank), call.read(source)
    largest = int(bool(call["descending"]))
    made = call.many("TopK", [x, call.size(x, axis)], 2, axis=axis, largest=largest, sorted=1)
    return made[1] if "argsort" in str(call.node.target) else made
