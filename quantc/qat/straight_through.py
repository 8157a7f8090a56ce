"""Fake quantization that gradients pass through: the numbers of `quantc.numerics`, to the bit, with a derivative.

torch's fused ops round as `quantized_decomposed` does (the zero point is added after rounding) and keep the mask of what
was not clipped for the way back; they serve tensors with one scale and with one for each channel. Everything else is
computed by `numerics.fake_quantize`, and its gradient goes straight through.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quantc import numerics
from quantc.formats import PerChannel, PerTensor
from quantc.layout import normal_axis
from quantc.numerics import QParams
from quantc.spec import QuantSpec

FUSED_BITS = 16
"""Wider integers are not exact in the float32 of torch's fused ops."""


def is_fused(spec: QuantSpec) -> bool:
    """Whether torch has an op for a spec that gives the same bits."""
    plain = isinstance(spec.granularity, PerTensor | PerChannel)
    return plain and not spec.dtype.is_float and spec.dtype.bits <= FUSED_BITS


def fake_quantize(x: Tensor, qparams: QParams, spec: QuantSpec) -> Tensor:
    """What is left of a tensor once it was quantized. Gradients pass where nothing was clipped; of other floats than
    float32 the result is rounded to them again."""
    if x.dtype != torch.float32:
        return fake_quantize(x.float(), qparams, spec).to(x.dtype)
    if not is_fused(spec):
        return passed_through(x, numerics.fake_quantize(x.detach(), qparams, spec))
    scale, zero_point = qparams.scale, qparams.zero_point.to(torch.int32)
    if isinstance(spec.granularity, PerChannel):
        axis = normal_axis(spec.granularity.axis, x.dim())
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, spec.qmin, spec.qmax)
    return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, spec.qmin, spec.qmax)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def passed_through(x: Tensor, value: Tensor) -> Tensor:
    """`value`, with the gradient of `x`."""
    return _Through.apply(x, value)  # type: ignore[no-any-return, no-untyped-call]


class _Learned(torch.autograd.Function):
    """LSQ and LSQ+: rounding counts as the identity on the way back, and clipping as what it is."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, shape: tuple[int, ...], factor: float
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point)
        ctx.spec, ctx.shape, ctx.factor = spec, shape, factor
        return fake_quantize(x, QParams(scale, torch.round(zero_point).to(torch.int64)), spec)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, scale, zero_point = ctx.saved_tensors
        spec, grad = ctx.spec, grads[0]
        step, zero = scale.reshape(ctx.shape), torch.round(zero_point).reshape(ctx.shape)
        steps = x * (1.0 / step)
        rounded = torch.round(steps)
        low, high = spec.qmin - zero, spec.qmax - zero
        kept = (rounded >= low) & (rounded <= high)
        clipped = torch.minimum(torch.maximum(rounded, low), high)
        over = [dim for dim, size in enumerate(ctx.shape) if size == 1 or not scale.dim()]
        of_x = grad * kept if ctx.needs_input_grad[0] else None
        of_scale = of_zero = None
        if ctx.needs_input_grad[1]:
            slopes = grad * torch.where(kept, rounded - steps, clipped)
            of_scale = _summed(slopes, over, scale) * ctx.factor
        if ctx.needs_input_grad[2]:
            of_zero = _summed(torch.where(kept, 0.0, -grad * step), over, scale) * ctx.factor
        return of_x, of_scale, of_zero, None, None, None


def _summed(values: Tensor, over: list[int], like: Tensor) -> Tensor:
    total = values.sum(over) if over else values
    return total.reshape(like.shape)


def learned_fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, spec: QuantSpec, factor: float) -> Tensor:
    """Fake quantization whose scale, and zero point if it asks for a gradient, are learned.

    The gradients of both are multiplied by `factor`. A zero point that lies between two integers counts as the nearer.
    """
    if x.dtype != torch.float32:
        return learned_fake_quantize(x.float(), scale, zero_point, spec, factor).to(x.dtype)
    shape = [1] * x.dim()
    if isinstance(spec.granularity, PerChannel):
        shape[normal_axis(spec.granularity.axis, x.dim())] = -1
        shape = [scale.numel() if size == -1 else size for size in shape]
    value: Tensor = _Learned.apply(x, scale, zero_point, spec, tuple(shape), factor)  # type: ignore[no-untyped-call]
    return value


def gradient_factor(elements: int, spec: QuantSpec) -> float:
    """LSQ's: the gradient of a scale is a sum over its elements, and made as large as that of one weight."""
    return 1.0 / math.sqrt(max(elements, 1) * max(spec.qmax, 1))
