"""ATen's ops that quantc computes on quantized tensors: what models call as functions, or as float modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantc.nn import functional_ops
from quantc.nn.quantized_tensor import QuantizedTensor, handles

aten = torch.ops.aten

POINTWISE = (
    aten.leaky_relu.default, aten.sigmoid.default, aten.tanh.default, aten.hardsigmoid.default, aten.elu.default,
    aten.celu.default, aten.threshold.default,
)  # fmt: skip
"""Functions of one number that torch's quantized tensors take; others are refused, since no grid is known for them."""
CLAMPS: dict[Any, Callable[..., tuple[float | None, float | None]]] = {
    aten.relu.default: lambda: (0.0, None),
    aten.hardtanh.default: lambda low=-1.0, high=1.0: (low, high),
    aten.relu6.default: lambda: (0.0, 6.0),
    aten.clamp.default: lambda low=None, high=None: (low, high),
    aten.clamp_min.default: lambda low: (low, None),
    aten.clamp_max.default: lambda high: (None, high),
}
"""The bounds of each clamping op, as functions of its other arguments."""
CLAMPS_IN_PLACE: dict[Any, Any] = {
    aten.relu_.default: aten.relu.default,
    aten.hardtanh_.default: aten.hardtanh.default,
    aten.relu6_.default: aten.relu6.default,
    aten.clamp_.default: aten.clamp.default,
    aten.clamp_min_.default: aten.clamp_min.default,
}
IN_FLOAT = (
    aten.avg_pool2d.default, aten.avg_pool3d.default, aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default, aten.mean.dim, aten.mean.default, aten.upsample_nearest1d.default,
    aten.upsample_nearest2d.default, aten.upsample_nearest3d.default, aten.upsample_bilinear2d.default,
    aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.upsample_linear1d.default,
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.replication_pad2d.default,
)  # fmt: skip
"""Ops whose results lie within the range of their input (averages and the like): they stay on its grid."""


@handles(*POINTWISE)
def _pointwise(func: Any, q: QuantizedTensor, *settings: Any) -> QuantizedTensor:
    return functional_ops.pointwise(func, q, *settings)


@handles(*CLAMPS)
def _clamp(func: Any, q: QuantizedTensor, *bounds: Any, **named: Any) -> QuantizedTensor:
    return functional_ops.clamp_levels(q, *CLAMPS[func](*bounds, **named), what=str(func))


@handles(*CLAMPS_IN_PLACE)
def _clamp_(func: Any, q: QuantizedTensor, *bounds: Any, **named: Any) -> QuantizedTensor:
    return functional_ops.clamp_levels_(q, *CLAMPS[CLAMPS_IN_PLACE[func]](*bounds, **named), what=str(func))


@handles(*IN_FLOAT)
def _in_float(func: Any, q: QuantizedTensor, *args: Any, **kwargs: Any) -> QuantizedTensor:
    return functional_ops.in_float(lambda x: func(x, *args, **kwargs), q, what=str(func))


@handles(aten.max_pool2d_with_indices.default, aten.quantized_max_pool2d.default, aten.max_pool2d.default)
def _max_pool2d(func: Any, q: QuantizedTensor, *window: Any) -> Any:
    """Max pooling; torch's second result, the indices, is never read and stays empty."""
    made = functional_ops.max_pool2d(q, *window)
    return (made, torch.empty(0, dtype=torch.int64)) if func is aten.max_pool2d_with_indices.default else made


@handles(aten.native_dropout.default)
def _dropout(func: Any, q: QuantizedTensor, p: float, train: bool | None) -> tuple[QuantizedTensor, Tensor]:
    """Identity: dropout does nothing to quantized tensors."""
    return q, torch.ones(q.shape, dtype=torch.bool)
