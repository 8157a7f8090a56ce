"""ONNX writers of quantize, dequantize and run-time qparams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from quantc.ir.dialect import target_name
from quantc.qdq import choose_qparams as run_time
from quantc.qdq import float_ops as float_formats
from quantc.qdq.registration import decomposed_ops
from quantc.spec.instruction_sets import SIGN_SHIFT
from quantc.spec.spec import FLOAT32_EPS
from quantc.targets.onnx.dtypes import BOUNDS, onnx_type
from quantc.targets.onnx.op_writers import OpCall, Value, writes

decomposed = decomposed_ops()


def _name(op: str) -> str:
    return f"quantized_decomposed.{op}"


def quantized_bounds(
    bounds: tuple[float | None, float | None], scale: float, zero_point: int, ends: tuple[int, int]
) -> tuple[int, int]:
    """Clamp bounds before a quantize op as bounds of levels: quantization is monotone."""
    levels = list(ends)
    for side, bound in enumerate(bounds):
        if bound is not None:
            level = decomposed.quantize_per_tensor(torch.tensor([float(bound)]), scale, zero_point, *ends, torch.int32)
            levels[side] = int(level)
    return levels[0], levels[1]


def _clip(call: OpCall, levels: str, ends: tuple[int, int], dtype: torch.dtype) -> str:
    """Levels within a range that is narrower than their type: QuantizeLinear knows the type alone."""
    low, high = BOUNDS[onnx_type(dtype)]
    if ends == (low, high):
        return levels
    return call.emit("Clip", levels, call.writer.scalar(ends[0], dtype), call.writer.scalar(ends[1], dtype))


@dataclass(frozen=True)
class OnnxGrid:
    """Static qparams, as written."""

    scale: float
    zero_point: int
    ends: tuple[int, int]
    dtype: torch.dtype

    @staticmethod
    def of(call: OpCall) -> OnnxGrid:
        """Qparams of a quantize or dequantize op; int8 is shifted if the profile wants uint8."""
        scale, zero_point, qmin, qmax, dtype = call.node.args[1:6]
        is_shifted = dtype is torch.int8 and call.translation.profile.activations == "uint8"
        shift = SIGN_SHIFT if is_shifted else 0
        ends = (int(qmin) + shift, int(qmax) + shift)  # type: ignore[arg-type]
        kind = torch.uint8 if is_shifted else dtype
        return OnnxGrid(float(scale), int(zero_point) + shift, ends, kind)  # type: ignore[arg-type]

    def constants(self, call: OpCall) -> tuple[str, str]:
        return call.writer.scalar(self.scale, torch.float32), call.writer.scalar(self.zero_point, self.dtype)


@writes(_name("quantize_per_tensor.default"))
def quantize(call: OpCall) -> Value:
    source, grid = call.node.args[0], OnnxGrid.of(call)
    bounds = call.translation.bounds.get(source, (None, None))  # type: ignore[arg-type]
    ends = quantized_bounds(bounds, grid.scale, grid.zero_point, grid.ends)
    x, qparams = call.read(source, torch.float32), grid.constants(call)
    if call.translation.profile.clips == "float" or grid.dtype.itemsize > 1:  # ONNX Runtime clips no 16-bit integers
        return call.emit("QuantizeLinear", _clip_before(call, x, ends, grid), *qparams)
    return _clip(call, call.emit("QuantizeLinear", x, *qparams), ends, grid.dtype)


def _clip_before(call: OpCall, x: str, ends: tuple[int, int], grid: OnnxGrid) -> str:
    """Values clamped to a narrower range. A bound, divided by the scale, is within one part in 2^22 of its level, and rounds to it."""
    if ends == BOUNDS[onnx_type(grid.dtype)]:
        return x
    bounds = (call.writer.scalar((end - grid.zero_point) * grid.scale, torch.float32) for end in ends)
    return call.emit("Clip", x, *bounds)


@writes(_name("dequantize_per_tensor.default"))
def dequantize(call: OpCall) -> Value:
    return write_dequantize(call, call.read(call.node.args[0]))


def write_dequantize(call: OpCall, levels: str) -> str:
    """Levels dequantized as by a dequantize op. A zero point of zero is omitted: ONNX Runtime 1.31 does not load some
    models with explicit int8 ones.
    """
    grid = OnnxGrid.of(call)
    qparams = grid.constants(call)
    is_plain = grid.dtype is torch.int8 and grid.zero_point == 0
    return call.emit("DequantizeLinear", levels, *(qparams[:1] if is_plain else qparams))


@writes(_name("quantize_per_channel.default"))
def quantize_per_channel(call: OpCall) -> Value:
    source, scale, zero_point, axis, qmin, qmax, dtype = call.node.args[:7]
    zero = call.read(zero_point, dtype)  # type: ignore[arg-type]
    levels = call.emit("QuantizeLinear", call.read(source, torch.float32), call.read(scale), zero, axis=axis)
    return _clip(call, levels, (int(qmin), int(qmax)), dtype)  # type: ignore[arg-type]


@writes(_name("dequantize_per_channel.default"))
def dequantize_per_channel(call: OpCall) -> Value:
    source, scale, zero_point, axis, _, _, dtype = call.node.args[:7]
    zero = () if zero_point is None else (call.read(zero_point, dtype),)  # type: ignore[arg-type]
    return call.emit("DequantizeLinear", call.read(source), call.read(scale), *zero, axis=axis)


# -- scales that are found as the model runs -----------------------------------------------------------------------


@writes(_name("choose_qparams.tensor"))
def choose(call: OpCall) -> Value:
    source, qmin, qmax, eps, dtype = call.node.args[:5]
    x = call.read(source, torch.float32)
    if (qmin, qmax, dtype) == (0, 255, torch.uint8) and float(eps) <= FLOAT32_EPS:  # type: ignore[arg-type]
        levels, scale, zero_point = call.many("DynamicQuantizeLinear", [x], 3)
        call.translation.chosen[call.node] = levels
        return scale, zero_point
    low, high = _extremes(call, x, None)
    scale, zero_point = _affine(call, low, high, int(qmin), int(qmax), float(eps))  # type: ignore[arg-type]
    return scale, call.writer.cast(zero_point, dtype)  # type: ignore[arg-type]


def _extremes(call: OpCall, x: str, axis: int | None) -> tuple[str, str]:
    """The smallest and the largest number, zero among them: of all, or along an axis."""
    zero = call.writer.scalar(0.0, torch.float32)
    axes = () if axis is None else (call.writer.numbers([axis]),)
    kept = int(axis is not None)
    low = call.emit("Min", call.emit("ReduceMin", x, *axes, keepdims=kept), zero)
    high = call.emit("Max", call.emit("ReduceMax", x, *axes, keepdims=kept), zero)
    return low, high


def _affine(call: OpCall, low: str, high: str, qmin: int, qmax: int, eps: float) -> tuple[str, str]:
    """Scale and zero point, the latter in float."""
    number = call.writer.scalar
    span = call.emit("Div", call.emit("Sub", high, low), number(float(qmax - qmin), torch.float32))
    scale = call.emit("Max", span, number(eps, torch.float32))
    offset = call.emit("Sub", number(float(qmin), torch.float32), call.emit("Round", call.emit("Div", low, scale)))
    ends = (number(float(qmin), torch.float32), number(float(qmax), torch.float32))
    return scale, call.emit("Clip", offset, *ends)


def _symmetric(call: OpCall, low: str, high: str, zero_point: int, span: float, eps: float) -> tuple[str, str]:
    number = call.writer.scalar
    farthest = call.emit("Max", call.emit("Neg", low), high)
    half = call.emit("Div", farthest, number(span / 2, torch.float32))
    return call.emit("Max", half, number(eps, torch.float32)), number(float(zero_point), torch.float32)


@writes(target_name(run_time.CHOOSE))
def choose_own(call: OpCall) -> Value:
    """A per-token zero point stays float, as the per-token ops compute with it; a per-tensor one has its own type."""
    per_token, zero_point = call["per_token"], call["zero_point"]
    qmin, qmax, eps = int(call["qmin"]), int(call["qmax"]), float(call["eps"])
    low, high = _extremes(call, call.tensor("x", torch.float32), -1 if per_token else None)
    if zero_point is None:
        scale, zero = _affine(call, low, high, qmin, qmax, eps)
    else:
        scale, zero = _symmetric(call, low, high, int(zero_point), qmax - qmin, eps)
    return scale, zero if per_token else call.writer.cast(zero, torch.int8 if qmin < 0 else torch.uint8)


@writes(_name("quantize_per_tensor.tensor"))
def quantize_chosen(call: OpCall) -> Value:
    source, scale, zero_point, qmin, qmax, dtype = call.node.args[:6]
    choice = scale.args[0] if isinstance(scale, fx.Node) and scale.args else None
    if isinstance(choice, fx.Node) and choice in call.translation.chosen and choice.args[0] is source:
        return call.translation.chosen[choice]
    qparams = [call.translation.value(given) for given in (scale, zero_point)]  # type: ignore[arg-type]
    levels = call.emit("QuantizeLinear", call.read(source, torch.float32), *qparams)
    return _clip(call, levels, (int(qmin), int(qmax)), dtype)  # type: ignore[arg-type]


@writes(_name("dequantize_per_tensor.tensor"))
def dequantize_chosen(call: OpCall) -> Value:
    names = [call.translation.value(given) for given in call.node.args[:3]]  # type: ignore[arg-type]
    return call.emit("DequantizeLinear", *names)


@writes(_name("quantize_per_token.default"))
def quantize_tokens(call: OpCall) -> Value:
    source, scale, zero_point, qmin, qmax, dtype = call.node.args[:6]
    names = [call.translation.value(given) for given in (scale, zero_point)]  # type: ignore[arg-type]
    one = call.writer.scalar(1.0, torch.float32)
    scaled = call.emit("Mul", call.read(source, torch.float32), call.emit("Div", one, names[0]))
    levels = call.emit("Round", call.emit("Add", scaled, names[1]))
    ends = [call.writer.scalar(float(end), torch.float32) for end in (qmin, qmax)]  # type: ignore[arg-type]
    return call.writer.cast(call.emit("Clip", levels, *ends), dtype)  # type: ignore[arg-type]


@writes(_name("dequantize_per_token.default"))
def dequantize_tokens(call: OpCall) -> Value:
    source, scale, zero_point = call.node.args[:3]
    names = [call.translation.value(given) for given in (scale, zero_point)]  # type: ignore[arg-type]
    wide = call.writer.cast(call.read(source), torch.float32)
    return call.emit("Mul", call.emit("Sub", wide, names[1]), names[0])


@writes(target_name(float_formats.DEQUANTIZE))
def dequantize_float(call: OpCall) -> Value:
    raise call.refuse("only constants are stored in narrower floats")
