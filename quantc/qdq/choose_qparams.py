"""Dynamic quantization: `torch.ops.quantc.choose_qparams`, and its helpers.

torch has an op for affine per-tensor qparams, and the Q/DQ form uses it. This one covers the rest: per-token scales,
and fixed zero points. Both give the same bits as `numerics.qparams_from_range`.

A tensor that is not finite, or whose range overflows float32, has no scale: the scale is NaN, and so is everything
computed with it, and nothing else. An empty tensor has the smallest scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.spec.aten_arithmetic import aten

_LIBRARY = torch.library.Library("quantc", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "choose_qparams(Tensor x, bool per_token, int? zero_point, int qmin, int qmax, float eps) -> (Tensor, Tensor)"
)


def choose_qparams(
    x: Tensor, per_token: bool, zero_point: int | None, qmin: int, qmax: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Scale (float32) and zero point (int32) of a tensor, or of each row along the last axis, from its own range.

    Affine without a zero point, symmetric about it with one.
    """
    return qparams_between(*extremes(x, per_token), zero_point, qmin, qmax, eps)


def extremes(x: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of a tensor, or of each row along the last axis, extended to contain zero.

    There may be no rows: a batch may be empty, which is only known at run time.
    """
    wide = aten.to.dtype(x, torch.float32)
    if x.dim() == 0 or x.shape[-1] == 0:
        wide = aten.new_zeros.default(wide, [*x.shape[:-1], 1]) if x.dim() else aten.reshape.default(wide, [1])
    zero = aten.new_zeros.default(wide, [1])
    low, high = aten.amin.default(wide, [-1], True), aten.amax.default(wide, [-1], True)
    if per_token:
        return aten.minimum.default(low, zero), aten.maximum.default(high, zero)
    ends = [aten.cat.default([aten.reshape.default(end, [-1]), zero]) for end in (low, high)]
    return aten.amin.default(ends[0]), aten.amax.default(ends[1])


def qparams_between(
    low: Tensor, high: Tensor, zero_point: int | None, qmin: int, qmax: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Scales and zero points of ranges that contain zero."""
    if zero_point is not None:
        farthest = aten.maximum.default(aten.neg.default(low), high)
        scale = _finite(aten.clamp.default(aten.div.Tensor(farthest, (qmax - qmin) / 2), eps))
        return scale, aten.full_like.default(scale, zero_point, dtype=torch.int32)
    scale = _finite(aten.clamp.default(aten.div.Tensor(aten.sub.Tensor(high, low), float(qmax - qmin)), eps))
    offset = aten.rsub.Scalar(aten.round.default(aten.div.Tensor(low, scale)), qmin)
    return scale, aten.to.dtype(aten.clamp.default(offset, qmin, qmax), torch.int32)


def _finite(scale: Tensor) -> Tensor:
    """Map infinity to NaN: the sign of an integer sum times infinity would be arbitrary."""
    result: Tensor = aten.add.Tensor(scale, aten.sub.Tensor(scale, scale))
    return result


torch.library.impl("quantc::choose_qparams", "CompositeExplicitAutograd", choose_qparams, lib=_LIBRARY)
CHOOSE: Any = torch.ops.quantc.choose_qparams.default


def quantize_tensor(
    x: Tensor, scale: Tensor, zero_point: Tensor, per_token: bool, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    """Quantize a tensor, bit for bit as torch's ops: the per-token one adds the zero point before it rounds."""
    levels = aten.mul.Tensor(aten.to.dtype(x, torch.float32), aten.reciprocal.default(scale))
    if per_token:
        levels = aten.round.default(aten.add.Tensor(levels, zero_point))
    else:
        levels = aten.add.Tensor(aten.round.default(levels), zero_point)
    result: Tensor = aten.to.dtype(aten.clamp.default(levels, qmin, qmax), dtype)
    return result
