"""ONNX writers of elementwise ops: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx

from quantc.ir.dialect import is_op
from quantc.ir.types import ScalarType, dtype_of, type_of
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.targets.onnx.op_writers import OpCall, Value, along_an_axis, writes

PLAIN: dict[str, tuple[str, ...]] = {
    "Abs": ("abs",),
    "Ceil": ("aten.ceil.default",),
    "Cos": ("cos",),
    "Erf": ("erf",),
    "Exp": ("exp",),
    "Floor": ("aten.floor.default",),
    "HardSwish": ("hardswish",),
    "IsNaN": ("aten.isnan.default",),
    "Log": ("log",),
    "Mish": ("mish",),
    "Neg": ("neg",),
    "Not": ("aten.logical_not.default", "aten.bitwise_not.default"),
    "Reciprocal": ("reciprocal",),
    "Round": ("aten.round.default",),
    "Selu": ("selu",),
    "Sigmoid": ("sigmoid",),
    "Sign": ("aten.sign.default",),
    "Sin": ("sin",),
    "Sqrt": ("sqrt",),
    "Tanh": ("tanh",),
}
"""Ops of one operand that ONNX has as they are."""
COMPARISONS = {"eq": "Equal", "gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual"}
LOGIC = {"logical_and": "And", "logical_or": "Or", "logical_xor": "Xor"}
BINARY = {
    "mul": "Mul",
    "maximum": "Max",
    "minimum": "Min",
    "pow": "Pow",
    "aten.pow.Tensor_Tensor": "Pow",
}


def _first(call: OpCall) -> Any:
    return call.node.args[0]


def _plain(op: str, call: OpCall) -> Value:
    source: Any = _first(call)
    if op == "Not" and dtype_of(source) is not torch.bool:
        if "bitwise" in str(call.node.target):
            return call.emit("BitwiseNot", call.read(source))
        return call.emit(op, call.read(source, torch.bool))
    dtype = None if op in ("Not", "IsNaN") else call.result.dtype
    return call.emit(op, call.read(source, dtype))


for op, names in PLAIN.items():
    writes(*names)(partial(_plain, op))


def _binary(op: str, call: OpCall) -> Value:
    dtype = call.result.dtype
    return call.emit(op, *(call.read(given, dtype) for given in call.node.args[:2]))


for name, op in BINARY.items():
    writes(name)(partial(_binary, op))


def _times_alpha(call: OpCall, given: Any) -> str:
    """A second operand times alpha."""
    dtype, alpha = call.result.dtype, call["alpha"]
    value = call.read(given, dtype)
    return value if alpha == 1 else call.emit("Mul", value, call.writer.scalar(alpha, dtype))


@writes("add")
def add(call: OpCall) -> Value:
    is_before_norm = any(is_op(user, "layer_norm") for user in call.node.users)
    op = call.translation.profile.before_norm if is_before_norm else "Add"
    return call.emit(op, call.tensor("x", call.result.dtype), _times_alpha(call, call["y"]))


@writes("sub")
def sub(call: OpCall) -> Value:
    return call.emit("Sub", call.tensor("x", call.result.dtype), _times_alpha(call, call["y"]))


@writes("rsub")
def rsub(call: OpCall) -> Value:
    return call.emit("Sub", call.tensor("y", call.result.dtype), _times_alpha(call, call["x"]))


@writes("div")
def div(call: OpCall) -> Value:
    dtype = call.result.dtype
    return call.emit("Div", call.tensor("x", dtype), call.tensor("y", dtype))


@writes("aten.div.Tensor_mode", "aten.floor_divide.default")
def divide_rounding(call: OpCall) -> Value:
    dtype = call.result.dtype
    left, right = (call.read(given, dtype) for given in call.node.args[:2])
    mode = call.node.kwargs.get("rounding_mode", "floor")
    if mode == "floor":
        return floor_divide(call, left, right) if dtype.is_floating_point else floored_integers(call, left, right)
    divided = call.emit("Div", left, right)
    if mode == "trunc" and dtype.is_floating_point:
        return call.emit("Mul", call.emit("Sign", divided), call.emit("Floor", call.emit("Abs", divided)))
    return divided


def floored_integers(call: OpCall, left: str, right: str) -> str:
    """Floor division of integers: ONNX's own division truncates."""
    return call.emit("Div", call.emit("Sub", left, call.emit("Mod", left, right)), right)


def floor_divide(call: OpCall, left: str, right: str) -> str:
    """Floor division of floats as in torch: through the exact remainder, since a rounded quotient may be on the other
    side of an integer.
    """
    dtype = call.result.dtype
    one, half, zero = (call.writer.scalar(number, dtype) for number in (1.0, 0.5, 0.0))
    rest = call.emit("Mod", left, right, fmod=1)
    whole = call.emit("Div", call.emit("Sub", left, rest), right)
    whole = call.emit("Where", _is_opposite(call, rest, right), call.emit("Sub", whole, one), whole)
    down = call.emit("Floor", whole)
    is_short = call.emit("Greater", call.emit("Sub", whole, down), half)
    found = call.emit("Where", is_short, call.emit("Add", down, one), down)
    return call.emit("Where", call.emit("Equal", right, zero), call.emit("Div", left, right), found)


def _is_opposite(call: OpCall, rest: str, right: str) -> str:
    """True where a truncated remainder has the other sign than the divisor."""
    zero = call.writer.scalar(0.0, call.result.dtype)
    is_other = call.emit("Xor", call.emit("Less", rest, zero), call.emit("Less", right, zero))
    return call.emit("And", call.emit("Not", call.emit("Equal", rest, zero)), is_other)


@writes("aten.remainder.Scalar", "aten.remainder.Tensor")
def remainder(call: OpCall) -> Value:
    dtype = call.result.dtype
    left, right = (call.read(given, dtype) for given in call.node.args[:2])
    if not dtype.is_floating_point:
        return call.emit("Mod", left, right)
    rest = call.emit("Mod", left, right, fmod=1)
    return call.emit("Where", _is_opposite(call, rest, right), call.emit("Add", rest, right), rest)


def _compare(op: str, call: OpCall) -> Value:
    left, right = call.node.args[:2]
    dtype = torch.result_type(_stand_in(call, left), _stand_in(call, right))
    if dtype is torch.bool and op not in ("Equal", "NotEqual"):
        dtype = torch.int32  # ONNX has no order of bools
    names = [call.read(given, dtype) for given in (left, right)]
    return call.emit("Not", call.emit("Equal", *names)) if op == "NotEqual" else call.emit(op, *names)


def _stand_in(call: OpCall, given: Any) -> Any:
    """Something that torch finds the same common type with."""
    if not isinstance(given, fx.Node):
        return given
    kind = type_of(given)
    if isinstance(kind, ScalarType):
        return 0
    known = call.type(given)
    return torch.empty((1,) * known.rank, dtype=known.dtype, device="meta")


for short, op in {**COMPARISONS, "ne": "NotEqual"}.items():
    writes(f"aten.{short}.Tensor", f"aten.{short}.Scalar")(partial(_compare, op))


def _logic(op: str, call: OpCall) -> Value:
    left, right = (call.read(given, torch.bool) for given in call.node.args[:2])
    return call.emit(op, left, right)


for short, op in LOGIC.items():
    writes(f"aten.{short}.default")(partial(_logic, op))


@writes("aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor")
def bitwise(call: OpCall) -> Value:
    op, dtype = "And" if "and" in str(call.node.target) else "Or", call.result.dtype
    if dtype is torch.bool:
        return _logic(op, call)
    return call.emit(f"Bitwise{op}", *(call.read(given, dtype) for given in call.node.args[:2]))


@writes("where")
def where(call: OpCall) -> Value:
    dtype = call.result.dtype
    return call.emit("Where", call.tensor("condition", torch.bool), call.tensor("x", dtype), call.tensor("y", dtype))


@writes("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where_number(call: OpCall) -> Value:
    condition, x, y = call.node.args[:3]
    dtype = call.result.dtype
    return call.emit("Where", call.read(condition, torch.bool), call.read(x, dtype), call.read(y, dtype))


@writes("masked_fill", "aten.masked_fill.Tensor")
def masked_fill(call: OpCall) -> Value:
    x, mask, value = call.node.args[:3]
    dtype = call.result.dtype
    return call.emit("Where", call.read(mask, torch.bool), call.read(value, dtype), call.read(x, dtype))


@writes("cast", "aten._to_copy.default")
def cast(call: OpCall) -> Value:
    source: Any = _first(call)
    dtype = call.result.dtype
    name = call.translation.value(source)
    return name if dtype_of(source) == dtype else call.writer.cast(name, dtype)


@writes("aten.type_as.default")
def type_as(call: OpCall) -> Value:
    return call.read(_first(call), call.result.dtype)


# -- activations ---------------------------------------------------------------------------------------------------


@writes("relu")
def relu(call: OpCall) -> Value:
    return call.emit("Relu", call.tensor("x"))


@writes("clamp")
def clamp(call: OpCall) -> Value:
    dtype = call.result.dtype
    ends = ["" if call[name] is None else call.tensor(name, dtype) for name in ("min", "max")]
    while ends and not ends[-1]:
        ends.pop()
    return call.emit("Clip", call.tensor("x", dtype), *ends)


@writes("hardsigmoid")
def hardsigmoid(call: OpCall) -> Value:
    return call.emit("HardSigmoid", call.tensor("x"), alpha=1 / 6, beta=0.5)


@writes("silu")
def silu(call: OpCall) -> Value:
    x = call.tensor("x")
    return call.emit("Mul", x, call.emit("Sigmoid", x))


@writes("gelu")
def gelu(call: OpCall) -> Value:
    return call.emit("Gelu", call.tensor("x"), approximate=call["approximate"])


@writes("leaky_relu")
def leaky_relu(call: OpCall) -> Value:
    return call.emit("LeakyRelu", call.tensor("x"), alpha=float(call["negative_slope"]))


@writes("elu")
def elu(call: OpCall) -> Value:
    x, alpha = call.tensor("x"), float(call["alpha"])
    if (call["scale"], call["input_scale"]) == (1, 1):
        return call.emit("Elu", x, alpha=alpha)
    number = partial(call.writer.scalar, dtype=call.result.dtype)
    below = call.emit("Elu", call.emit("Mul", x, number(float(call["input_scale"]))), alpha=alpha)
    made = call.emit("Where", call.emit("Greater", x, number(0.0)), x, below)
    return call.emit("Mul", made, number(float(call["scale"])))


@writes("celu")
def celu(call: OpCall) -> Value:
    return call.emit("Celu", call.tensor("x"), alpha=float(call["alpha"]))


@writes("prelu")
def prelu(call: OpCall) -> Value:
    along = [-1, *[1] * (call.rank() - 2)] if call.rank() > 1 else [1] * call.rank()
    slopes = call.emit("Reshape", call.tensor("w"), call.writer.numbers(along))
    return call.emit("PRelu", call.tensor("x"), slopes)


@writes("softshrink")
def softshrink(call: OpCall) -> Value:
    bound = float(call["lambd"])
    return call.emit("Shrink", call.tensor("x"), lambd=bound, bias=bound)


STRAIGHT = 20.0
"""From here on softplus(x) is x in float32."""


@writes("softplus")
def softplus(call: OpCall) -> Value:
    beta, threshold, x, dtype = float(call["beta"]), float(call["threshold"]), call.tensor("x"), call.result.dtype
    number = call.writer.scalar(beta, dtype)
    scaled = x if beta == 1 else call.emit("Mul", x, number)
    smooth = call.emit("Softplus", scaled)
    smooth = smooth if beta == 1 else call.emit("Div", smooth, number)
    if threshold >= STRAIGHT and dtype is torch.float32:
        return smooth
    return call.emit("Where", call.emit("Greater", scaled, call.writer.scalar(threshold, dtype)), x, smooth)


@writes("glu")
def glu(call: OpCall) -> Value:
    value, gate = call.many("Split", [call.tensor("x")], 2, axis=call.axis(call["dim"]), num_outputs=2)
    return call.emit("Mul", value, call.emit("Sigmoid", gate))


@writes("rsqrt")
def rsqrt(call: OpCall) -> Value:
    return call.emit("Reciprocal", call.emit("Sqrt", call.tensor("x")))


@writes("softmax", "aten._safe_softmax.default")
@along_an_axis
def softmax(call: OpCall) -> Value:
    dtype, axis = call.result.dtype, int(call["dim"])
    x = call.read(_first(call), dtype)
    soft = call.emit("Softmax", x, axis=axis)
    if call.translation.profile.softmax == "apart" and _is_between_levels(call.node):
        soft = call.emit("Sum", soft)
    if "safe" not in str(call.node.target):
        return soft
    zero, lowest = (call.writer.scalar(number, dtype) for number in (0.0, -math.inf))
    highest = call.emit("ReduceMax", x, call.writer.numbers([axis]), keepdims=1)
    return call.emit("Where", call.emit("Equal", highest, lowest), zero, soft)  # fully masked rows


def _is_between_levels(node: fx.Node) -> bool:
    """True if an op reads a dequantized value and its result is quantized at once."""
    source: Any = node.args[0]
    return is_dequantize(source) and any(is_quantize(user) for user in node.users)


@writes("log_softmax")
@along_an_axis
def log_softmax(call: OpCall) -> Value:
    return call.emit("LogSoftmax", call.tensor("x", call.result.dtype), axis=int(call["dim"]))
