"""Ops on elements: arithmetic, comparisons, activations, casts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from quantc.dialect import is_op
from quantc.onnx.table import Call, Value, writes
from quantc.types import dtype_of

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
    "aten.remainder.Scalar": "Mod",
    "aten.remainder.Tensor": "Mod",
}


def _first(call: Call) -> Any:
    return call.node.args[0]


def _plain(op: str, call: Call) -> Value:
    source: Any = _first(call)
    if op == "Not" and dtype_of(source) is not torch.bool:
        raise call.refuse(f"{call.node.name} negates something that is not bool")
    dtype = None if op in ("Not", "IsNaN") else call.result.dtype
    return call.emit(op, call.read(source, dtype))


for op, names in PLAIN.items():
    writes(*names)(partial(_plain, op))


def _binary(op: str, call: Call) -> Value:
    dtype = call.result.dtype
    left, right = (call.read(given, dtype) for given in call.node.args[:2])
    attributes = {"fmod": 0} if op == "Mod" else {}
    if op == "Mod" and dtype.is_floating_point:
        raise call.refuse(f"{call.node.name} is a remainder of floats")
    return call.emit(op, left, right, **attributes)


for name, op in BINARY.items():
    writes(name)(partial(_binary, op))


def _scaled(call: Call, given: Any) -> str:
    """A second operand times alpha."""
    dtype, alpha = call.result.dtype, call["alpha"]
    value = call.read(given, dtype)
    return value if alpha == 1 else call.emit("Mul", value, call.writer.scalar(alpha, dtype))


@writes("add")
def add(call: Call) -> Value:
    is_before_norm = any(is_op(user, "layer_norm") for user in call.node.users)
    op = call.translation.profile.before_norm if is_before_norm else "Add"
    return call.emit(op, call.tensor("x", call.result.dtype), _scaled(call, call["y"]))


@writes("sub")
def sub(call: Call) -> Value:
    return call.emit("Sub", call.tensor("x", call.result.dtype), _scaled(call, call["y"]))


@writes("rsub")
def rsub(call: Call) -> Value:
    return call.emit("Sub", call.tensor("y", call.result.dtype), _scaled(call, call["x"]))


@writes("div")
def div(call: Call) -> Value:
    dtype = call.result.dtype
    return call.emit("Div", call.tensor("x", dtype), call.tensor("y", dtype))


@writes("aten.div.Tensor_mode", "aten.floor_divide.default")
def divide_rounding(call: Call) -> Value:
    dtype = call.result.dtype
    left, right = (call.read(given, dtype) for given in call.node.args[:2])
    divided = call.emit("Div", left, right)
    mode = call.node.kwargs.get("rounding_mode", "floor")
    if not dtype.is_floating_point and mode == "floor":
        remainder = call.emit("Mod", left, right)
        return call.emit("Div", call.emit("Sub", left, remainder), right)
    if mode == "trunc" and dtype.is_floating_point:
        return call.emit("Mul", call.emit("Sign", divided), call.emit("Floor", call.emit("Abs", divided)))
    return call.emit("Floor", divided) if mode == "floor" else divided


def _compared(op: str, call: Call) -> Value:
    left, right = call.node.args[:2]
    kinds = [dtype_of(given) if isinstance(given, fx.Node) else None for given in (left, right)]
    dtype = _common(kinds, (left, right))
    names = [call.read(given, dtype) for given in (left, right)]
    return call.emit("Not", call.emit("Equal", *names)) if op == "NotEqual" else call.emit(op, *names)


def _common(kinds: list[torch.dtype | None], given: tuple[Any, Any]) -> torch.dtype:
    """The type to compare in."""
    known = [kind for kind in kinds if kind is not None]
    if len(known) == 2:
        return torch.promote_types(known[0], known[1])
    own = known[0] if known else torch.float32
    number = next((value for value in given if not isinstance(value, fx.Node)), 0)
    is_fraction = isinstance(number, float) and not number.is_integer()
    return torch.float32 if is_fraction and not own.is_floating_point else own


for short, op in {**COMPARISONS, "ne": "NotEqual"}.items():
    writes(f"aten.{short}.Tensor", f"aten.{short}.Scalar")(partial(_compared, op))


def _logic(op: str, call: Call) -> Value:
    left, right = (call.read(given, torch.bool) for given in call.node.args[:2])
    return call.emit(op, left, right)


for short, op in LOGIC.items():
    writes(f"aten.{short}.default")(partial(_logic, op))


@writes("aten.bitwise_and.Tensor", "aten.bitwise_or.Tensor")
def bitwise(call: Call) -> Value:
    if call.result.dtype is not torch.bool:
        raise call.refuse(f"{call.node.name} is on integers")
    return _logic("And" if "and" in str(call.node.target) else "Or", call)


@writes("where")
def where(call: Call) -> Value:
    dtype = call.result.dtype
    return call.emit("Where", call.tensor("condition", torch.bool), call.tensor("x", dtype), call.tensor("y", dtype))


@writes("aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where_number(call: Call) -> Value:
    condition, x, y = call.node.args[:3]
    dtype = call.result.dtype
    return call.emit("Where", call.read(condition, torch.bool), call.read(x, dtype), call.read(y, dtype))


@writes("masked_fill", "aten.masked_fill.Tensor")
def masked_fill(call: Call) -> Value:
    x, mask, value = call.node.args[:3]
    dtype = call.result.dtype
    return call.emit("Where", call.read(mask, torch.bool), call.read(value, dtype), call.read(x, dtype))


@writes("cast", "aten._to_copy.default")
def cast(call: Call) -> Value:
    source: Any = _first(call)
    dtype = call.result.dtype
    name = call.translation.value(source)
    return name if dtype_of(source) == dtype else call.writer.cast(name, dtype)


@writes("aten.type_as.default")
def type_as(call: Call) -> Value:
    return call.read(_first(call), call.result.dtype)


# -- activations ---------------------------------------------------------------------------------------------------


@writes("relu")
def relu(call: Call) -> Value:
    return call.emit("Relu", call.tensor("x"))


@writes("clamp")
def clamp(call: Call) -> Value:
    dtype = call.result.dtype
    ends = ["" if call[name] is None else call.tensor(name, dtype) for name in ("min", "max")]
    while ends and not ends[-1]:
        ends.pop()
    return call.emit("Clip", call.tensor("x", dtype), *ends)


@writes("hardsigmoid")
def hardsigmoid(call: Call) -> Value:
    return call.emit("HardSigmoid", call.tensor("x"), alpha=1 / 6, beta=0.5)


@writes("silu")
def silu(call: Call) -> Value:
    x = call.tensor("x")
    return call.emit("Mul", x, call.emit("Sigmoid", x))


@writes("gelu")
def gelu(call: Call) -> Value:
    return call.emit("Gelu", call.tensor("x"), approximate=call["approximate"])


@writes("leaky_relu")
def leaky_relu(call: Call) -> Value:
    return call.emit("LeakyRelu", call.tensor("x"), alpha=float(call["negative_slope"]))


@writes("elu")
def elu(call: Call) -> Value:
    if (call["scale"], call["input_scale"]) != (1, 1):
        raise call.refuse(f"{call.node.name} has a scale")
    return call.emit("Elu", call.tensor("x"), alpha=float(call["alpha"]))


@writes("celu")
def celu(call: Call) -> Value:
    return call.emit("Celu", call.tensor("x"), alpha=float(call["alpha"]))


@writes("prelu")
def prelu(call: Call) -> Value:
    slopes = call.emit("Reshape", call.tensor("w"), call.writer.numbers([-1, *[1] * max(call.rank() - 2, 0)]))
    return call.emit("PRelu", call.tensor("x"), slopes)


@writes("softplus")
def softplus(call: Call) -> Value:
    beta, x = float(call["beta"]), call.tensor("x")
    number = call.writer.scalar(beta, call.result.dtype)
    scaled = x if beta == 1 else call.emit("Mul", x, number)
    smooth = call.emit("Softplus", scaled)
    return smooth if beta == 1 else call.emit("Div", smooth, number)


@writes("glu")
def glu(call: Call) -> Value:
    value, gate = call.many("Split", [call.tensor("x")], 2, axis=call.axis(call["dim"]), num_outputs=2)
    return call.emit("Mul", value, call.emit("Sigmoid", gate))


@writes("rsqrt")
def rsqrt(call: Call) -> Value:
    return call.emit("Reciprocal", call.emit("Sqrt", call.tensor("x")))


@writes("softmax", "aten._safe_softmax.default")
def softmax(call: Call) -> Value:
    source: Any = _first(call)
    soft = call.emit("Softmax", call.read(source, call.result.dtype), axis=int(call["dim"]))
    if "safe" not in str(call.node.target):
        return soft
    zero = call.writer.scalar(0.0, call.result.dtype)
    return call.emit("Where", call.emit("IsNaN", soft), zero, soft)  # rows in which all is masked


@writes("log_softmax")
def log_softmax(call: Call) -> Value:
    return call.emit("LogSoftmax", call.tensor("x", call.result.dtype), axis=int(call["dim"]))
