"""Arithmetic of quantization: qparams from ranges, quantize, dequantize and requantize. The only module that rounds.

Quantizing is `clamp(round_half_even(x * (1 / scale)) + zero_point, qmin, qmax)` and gives the same bits as
`torch.ops.quantized_decomposed`, which the Q/DQ form runs. Where torch's ops add the zero point before they round (per
token and per group) so do these: the program must compute what was simulated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.errors import DataError
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor, PerToken, Scheme
from quantc.spec.granularity import extremes, group_view, normal_axis
from quantc.spec.spec import FLOAT32_DIGITS, POWER_OF_TWO, QuantSpec

BIAS_LIMIT = 2**30
"""The largest quantized bias: half of the accumulator's range."""


@dataclass(frozen=True, eq=False)
class QParams:
    """Scale (float32) and zero point (int64), one element for each set of numbers that share them.

    The shape is () per tensor, (channels,) per channel, and that of the tensor with the shared axis shortened per group
    and per token.
    """

    scale: Tensor
    zero_point: Tensor

    def equals(self, other: QParams) -> bool:
        """Bitwise equality."""
        return bool(torch.equal(self.scale, other.scale) and torch.equal(self.zero_point, other.zero_point))

    @property
    def one(self) -> tuple[float, int]:
        """Scale and zero point of a whole tensor, as Python numbers."""
        return float(self.scale.item()), int(self.zero_point.item())


# -- scales from ranges ----------------------------------------------------------------------------------------


def qparams_from_range(low: Tensor, high: Tensor, spec: QuantSpec, *, where: str = "") -> QParams:
    """The qparams of ranges, elementwise. Ranges are extended to contain zero; the scale is at least `spec.eps`."""
    _check_range(low, high, where)
    found = qparams_of_sound_range(low, high, spec)
    if not bool(torch.isfinite(found.scale).all()):
        raise DataError(
            f"the range {float(low.min())}..{float(high.max())} is wider than float32 can measure",
            where=where or None,
            advice="look for a value near the largest float32, such as a mask, and leave that tensor float",
        )
    return found


def qparams_of_sound_range(low: Tensor, high: Tensor, spec: QuantSpec) -> QParams:
    """The same for ranges known to be valid. No data-dependent control flow: it can be traced and compiled."""
    zero = torch.zeros((), dtype=torch.float32, device=low.device)
    low, high = torch.minimum(low.float(), zero), torch.maximum(high.float(), zero)
    if spec.dtype is DType.FP16:
        return QParams(torch.ones_like(low), torch.zeros_like(low, dtype=torch.int64))
    if spec.scheme is Scheme.SYMMETRIC:
        scale = allowed_scale(torch.maximum(-low, high) / (float(spec.qmax - spec.qmin) / 2), spec)
        zero_point = torch.full_like(scale, middle(spec), dtype=torch.int64)
    else:
        scale = allowed_scale((high - low) / float(spec.qmax - spec.qmin), spec)
        zero_point = spec.qmin - torch.round(low / scale).to(torch.int64)
        zero_point = zero_point.clamp(spec.qmin, spec.qmax)
    return QParams(scale, zero_point)


def allowed_scale(scale: Tensor, spec: QuantSpec) -> Tensor:
    """Scales with the significant bits that a spec gives them, none below its smallest one."""
    eps = torch.full((), spec.eps, dtype=torch.float32, device=scale.device)
    found = to_significant_bits(torch.maximum(scale, eps), spec.scale_bits)
    if spec.scale_bits >= FLOAT32_DIGITS:
        return found
    return torch.maximum(found, to_significant_bits(eps, spec.scale_bits, up=True))


def why_not_scale(scale: Tensor, spec: QuantSpec) -> str | None:
    """The reason why scales that were not derived from a range have more bits than a spec gives them; None if not."""
    odd = scale[to_significant_bits(scale, spec.scale_bits) != scale]
    if not odd.numel():
        return None
    bits = "no power of two" if spec.scale_bits == POWER_OF_TWO else f"of more than {spec.scale_bits} significant bits"
    return (
        f"the scale {float(odd.flatten()[0]):.6g} is {bits}, and the spec asks for that (scale_bits={spec.scale_bits})"
    )


def to_significant_bits(scale: Tensor, bits: int, *, up: bool = False) -> Tensor:
    """Scales rounded to the nearest float32 number of `bits` significant bits, or up to the next; a power of two is
    always rounded up, since the nearest could cut off a third of the range."""
    if bits >= FLOAT32_DIGITS:
        return scale
    mantissa, exponent = torch.frexp(scale)
    whole = torch.ceil if up or bits == POWER_OF_TWO else torch.round
    return torch.ldexp(whole(mantissa * 2.0**bits), exponent - bits)


def middle(spec: QuantSpec) -> int:
    """The zero point of a symmetric range; for uint8 it is 128, as in torch, or the lower middle of a narrower
    range."""
    if spec.dtype is not DType.UINT8:
        return 0
    return 128 if (spec.qmin, spec.qmax) == (0, 255) else (spec.qmin + spec.qmax) // 2


def _check_range(low: Tensor, high: Tensor, where: str) -> None:
    if not bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        raise DataError(
            "a range contains NaN or infinity",
            where=where or None,
            advice="look for the op that makes it, and correct the model or the data",
        )
    if not bool((low <= high).all()):
        raise DataError("a range ends before it begins", where=where or None, advice="give low first, then high")


def qparams_of(x: Tensor, spec: QuantSpec, *, where: str = "") -> QParams:
    """The qparams of a tensor by its own minimum and maximum: for weights, and for dynamic quantization."""
    if x.numel() == 0:
        raise DataError("an empty tensor has no range", where=where or None, advice="leave it float")
    refuse_non_finite(x, where=where)
    low, high = extremes(x.detach().float(), spec.granularity, where=where)
    return qparams_from_range(low, high, spec, where=where)


def refuse_non_finite(x: Tensor, *, where: str = "") -> None:
    """Raise DataError, with the count, if a tensor contains NaN or infinity."""
    bad = int((~torch.isfinite(x)).sum())
    if bad:
        raise DataError(
            f"{bad} of {x.numel()} values are NaN or infinite",
            where=where or None,
            advice="look for the op that makes them, and correct the model or the data",
        )


def scale_product(*parents: QParams) -> QParams:
    """The qparams of a bias: the product of the scales of input and weight, rounded once to float32; zero point 0."""
    product = parents[0].scale.double()
    for parent in parents[1:]:
        product = product * parent.scale.double()
    return QParams(product.float(), torch.zeros_like(product, dtype=torch.int64))


# -- quantize and dequantize -----------------------------------------------------------------------------------


def quantize(x: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """Quantize a tensor to the spec's number format."""
    x = x.float()
    if spec.dtype.is_float:
        return _to_float_format(x, qparams, spec)
    if isinstance(spec.granularity, PerTensor):
        scale, zero_point = qparams.one
        levels = torch.round(x * (1.0 / scale)) + zero_point
    elif isinstance(spec.granularity, PerChannel):
        scales, zero_points = _along(qparams, x, spec.granularity.axis)
        levels = torch.round(x * (1.0 / scales)) + zero_points
    else:
        view, scales, zero_points = _in_groups(x, qparams, spec)
        levels = torch.round(view * (1.0 / scales) + zero_points).reshape(x.shape)
    return levels.clamp(spec.qmin, spec.qmax).to(spec.dtype.storage)


def dequantize(q: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """The float32 values that quantized ones stand for."""
    if spec.dtype.is_float:
        view, scales = _spread(q.float(), qparams, spec)
        return (view * scales).reshape(q.shape)
    if isinstance(spec.granularity, PerTensor):
        scale, zero_point = qparams.one
        return (q.float() - zero_point) * scale
    if isinstance(spec.granularity, PerChannel):
        scales, zero_points = _along(qparams, q, spec.granularity.axis)
        return (q - zero_points) * scales
    view, scales, zero_points = _in_groups(q, qparams, spec)
    return ((view - zero_points) * scales).reshape(q.shape)


def fake_quantize(x: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """Quantize a tensor and dequantize it again."""
    return dequantize(quantize(x, qparams, spec), qparams, spec)


def _along(qparams: QParams, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Scales and zero points reshaped to broadcast along one axis of `x`."""
    shape = [1] * x.dim()
    shape[normal_axis(axis, x.dim())] = -1
    return qparams.scale.reshape(shape), qparams.zero_point.reshape(shape)


def _in_groups(x: Tensor, qparams: QParams, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """`x` with an axis for the elements of each group, and the qparams broadcast to it."""
    if isinstance(spec.granularity, PerToken):
        return x, qparams.scale, qparams.zero_point
    if not isinstance(spec.granularity, PerGroup):
        raise DataError(f"{spec.granularity} has no groups")
    view, axis = group_view(x, spec.granularity)
    return view, qparams.scale.unsqueeze(axis), qparams.zero_point.unsqueeze(axis)


def _spread(x: Tensor, qparams: QParams, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """`x` and its scales in broadcastable shapes, for formats without a zero point."""
    if isinstance(spec.granularity, PerTensor):
        return x, qparams.scale
    if isinstance(spec.granularity, PerChannel):
        return x, _along(qparams, x, spec.granularity.axis)[0]
    view, scales, _ = _in_groups(x, qparams, spec)
    return view, scales


def _to_float_format(x: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    view, scales = _spread(x, qparams, spec)
    scaled = (view * (1.0 / scales)).clamp(spec.qmin, spec.qmax)
    return scaled.reshape(x.shape).to(spec.dtype.storage)


# -- integer arithmetic ----------------------------------------------------------------------------------------


def requantize(
    accumulator: Tensor, multiplier: Tensor | float, zero_point: Tensor | int, qmin: int, qmax: int
) -> Tensor:
    """Requantize integers from one scale to another: `clamp(round_half_even(acc * M) + zero_point)`, in float64 with
    one rounding. Returns int64; `multiplier` must be broadcastable to the accumulator."""
    product = accumulator.double() * multiplier
    # clamp far outside any zero point, so that the sum below cannot overflow
    levels = torch.round(product).clamp(-(2.0**40), 2.0**40).to(torch.int64)
    return (levels + zero_point).clamp(qmin, qmax)


def multiplier(x_scale: Tensor, w_scale: Tensor, out_scale: Tensor) -> Tensor:
    """Requantization multiplier `sx * sw / so`, in float64."""
    return (x_scale.double() * w_scale.double()) / out_scale.double()


def quantize_bias(bias: Tensor, x_scale: Tensor, w_scale: Tensor, *, where: str = "") -> Tensor:
    """Quantize a bias to the scale of the accumulator, in int32. DataError if it exceeds `BIAS_LIMIT`: see
    `fit_weight_scale`."""
    refuse_non_finite(bias, where=where)
    levels = torch.round(bias.double() / (x_scale.double() * w_scale.double()))
    worst = float(levels.abs().max()) if levels.numel() else 0.0
    if worst > BIAS_LIMIT:
        raise DataError(
            f"the bias is {worst:.4g} steps of the accumulator, more than 2^30",
            where=where or None,
            advice="raise the weight scale of those channels with fit_weight_scale",
        )
    return levels.to(torch.int32)


def fit_weight_scale(bias: Tensor, x_scale: Tensor, w_scale: Tensor) -> Tensor:
    """The smallest float32 weight scales, none below those given, with which every quantized bias stays within
    `BIAS_LIMIT`."""
    magnitude, step = bias.double().abs(), x_scale.double()
    needed = magnitude / (step * BIAS_LIMIT)
    fitted = torch.maximum(needed.float(), w_scale.float())
    infinity = torch.full_like(fitted, math.inf)
    # rounding to float32 may have rounded down
    too_small = magnitude / (step * fitted.double()) > BIAS_LIMIT
    return torch.where(too_small, torch.nextafter(fitted, infinity), fitted)
