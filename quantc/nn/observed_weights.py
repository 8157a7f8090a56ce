"""Quantize float weights by an observer, quantc's or any with torch's interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.errors import SpecError
from quantc.nn.quantized_tensor import QuantizedTensor, quantize_per_channel, quantize_per_tensor
from quantc.spec.torch_dtypes import PER_CHANNEL, PER_TENSOR, PLAIN
from quantc.support.finite_tensors import check_scales

WEIGHT_DTYPES = (torch.qint8, torch.int8)
TABLE_DTYPES = (torch.quint8, torch.uint8, torch.quint4x2)


def observed_weight(weight: Tensor, observer: Any, observe: bool = True) -> QuantizedTensor:
    """A weight on the grid that its observer, or fake quantizer, finds for it."""
    if observe:
        observer(weight.detach().float())
    return quantize_weight(weight, observer)


def quantize_weight(weight: Tensor, observer: Any) -> QuantizedTensor:
    """A weight on the grid that its observer has found."""
    scale, zero_point = observer.calculate_qparams()
    check_scales(scale, "a weight")
    dtype, qscheme = observer.dtype, observer.qscheme
    weight = weight.detach().float()
    if qscheme in PER_TENSOR:
        made = quantize_per_tensor(weight, float(scale), int(zero_point), dtype)
    elif qscheme in PER_CHANNEL:
        made = quantize_per_channel(weight, scale.detach(), zero_point.detach(), observer.ch_axis, dtype)
    else:
        raise SpecError(f"a weight cannot be quantized with {qscheme}", advice="use a per-tensor or per-channel scheme")
    low, high = _bounds(observer, made.dtype)
    limits = torch.iinfo(made.dtype)
    return made if (low, high) == (limits.min, limits.max) else made.like(made.data_of.clamp(low, high))


def _bounds(observer: Any, dtype: torch.dtype) -> tuple[int, int]:
    """The levels that an observer allows. A fake quantizer may leave that to the observer within."""
    inner = getattr(observer, "activation_post_process", observer)
    limits = torch.iinfo(dtype)
    low, high = getattr(inner, "quant_min", None), getattr(inner, "quant_max", None)
    return limits.min if low is None else int(low), limits.max if high is None else int(high)


def check_weight_dtype(observer: Any, allowed: tuple[torch.dtype, ...], where: str) -> None:
    if observer.dtype not in allowed:
        plain = sorted({str(PLAIN.get(dtype, dtype)) for dtype in allowed})
        raise SpecError(
            f"its weight observer is for {observer.dtype}, and the module takes {', '.join(plain)}",
            where=where,
            advice="give the module a qconfig whose weight observer has that dtype",
        )
