"""Weights in narrower float formats: `torch.ops.quantc.quantize_float` and `dequantize_float`.

fp16 has no scale. fp8 has one per tensor or per channel. Values beyond the largest are clamped to it, as in
`numerics.quantize`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("quantc", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("quantize_float(Tensor x, Tensor? scale, int? axis, ScalarType dtype) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define("dequantize_float(Tensor q, Tensor? scale, int? axis) -> Tensor")  # type: ignore[no-untyped-call]


def quantize_float(x: Tensor, scale: Tensor | None, axis: int | None, dtype: torch.dtype) -> Tensor:
    """Divide a tensor by its scale and cast it to a narrower float format."""
    scaled = x.float() if scale is None else x.float() * (1.0 / _along(scale, axis, x))
    largest = torch.finfo(dtype).max
    return scaled.clamp(-largest, largest).to(dtype)


def dequantize_float(q: Tensor, scale: Tensor | None, axis: int | None) -> Tensor:
    """The float32 values that narrower ones stand for."""
    return q.float() if scale is None else q.float() * _along(scale, axis, q)


def _along(scale: Tensor, axis: int | None, x: Tensor) -> Tensor:
    """Scales reshaped to broadcast along one axis of `x`."""
    if axis is None:
        return scale
    shape = [1] * x.dim()
    shape[axis] = -1
    return scale.reshape(shape)


torch.library.impl("quantc::quantize_float", "CompositeExplicitAutograd", quantize_float, lib=_LIBRARY)
torch.library.impl("quantc::dequantize_float", "CompositeExplicitAutograd", dequantize_float, lib=_LIBRARY)
QUANTIZE: Any = torch.ops.quantc.quantize_float.default
DEQUANTIZE: Any = torch.ops.quantc.dequantize_float.default
