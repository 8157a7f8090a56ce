"""Layers quantized by hand, in plain torch: torch's observers find the scales, and its ops round.

Nothing of quantc is used here, so that what it computes can be held to it bit for bit.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization.fx._decomposed import quantized_decomposed_lib  # noqa: F401 - registers the ops

decomposed = torch.ops.quantized_decomposed


def _observer(kind: str, **options: Any) -> Any:
    from torch.ao.quantization import observer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(observer, kind)(**options)


def _numbers(observer: Any, values: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point that an observer finds for some values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observer(values)
        scale, zero_point = observer.calculate_qparams()
    return scale, zero_point


def weight_by_channel(w: Tensor, axis: int = 0, *, eps: float = 2.0**-23) -> Tensor:
    """A weight in int8, -127..127, symmetric, with a scale for each channel."""
    observer = _observer(
        "PerChannelMinMaxObserver", ch_axis=axis, dtype=torch.qint8, qscheme=torch.per_channel_symmetric,
        quant_min=-127, quant_max=127, eps=eps,
    )  # fmt: skip
    scale, zero_point = _numbers(observer, w.detach())
    levels = decomposed.quantize_per_channel(w.detach(), scale, zero_point, axis, -127, 127, torch.int8)
    back: Tensor = decomposed.dequantize_per_channel(levels, scale, zero_point, axis, -127, 127, torch.int8)
    return back


def weight_by_group(w: Tensor, size: int, qmin: int, qmax: int, *, axis: int = 1) -> Tensor:
    """A weight in few bits, symmetric, with a scale for each run of `size` elements along an axis."""
    rows = w.detach().movedim(axis, -1)
    groups = rows.reshape(-1, size)
    observer = _observer(
        "PerChannelMinMaxObserver", ch_axis=0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric,
        quant_min=qmin, quant_max=qmax, eps=2.0**-23,
    )  # fmt: skip
    scale, zero_point = _numbers(observer, groups)
    levels = decomposed.quantize_per_channel(groups, scale, zero_point, 0, qmin, qmax, torch.int8)
    back: Tensor = decomposed.dequantize_per_channel(levels, scale, zero_point, 0, qmin, qmax, torch.int8)
    return back.reshape(rows.shape).movedim(-1, axis)


def known(x: Tensor, seen: Tensor, *, qmin: int = 0, qmax: int = 255, eps: float = 2.0**-12) -> Tensor:
    """A tensor on the affine grid of the values that calibration saw."""
    dtype = torch.qint8 if qmin < 0 else torch.quint8
    storage = torch.int8 if qmin < 0 else torch.uint8
    observer = _observer("MinMaxObserver", dtype=dtype, quant_min=qmin, quant_max=qmax, eps=eps)
    scale, zero_point = _numbers(observer, seen)
    numbers = (float(scale), int(zero_point), qmin, qmax, storage)
    back: Tensor = decomposed.dequantize_per_tensor(decomposed.quantize_per_tensor(x, *numbers), *numbers)
    return back


def as_it_comes(x: Tensor, *, qmin: int = 0, qmax: int = 255, eps: float = 2.0**-12) -> Tensor:
    """A tensor on the affine grid of its own range."""
    return known(x, x, qmin=qmin, qmax=qmax, eps=eps)


def by_token(x: Tensor, *, qmin: int = 0, qmax: int = 255, eps: float = 2.0**-12) -> Tensor:
    """A tensor on affine grids, one for each row along the last axis."""
    dtype = torch.qint8 if qmin < 0 else torch.quint8
    storage = torch.int8 if qmin < 0 else torch.uint8
    observer = _observer(
        "PerChannelMinMaxObserver", ch_axis=0, dtype=dtype, qscheme=torch.per_channel_affine,
        quant_min=qmin, quant_max=qmax, eps=eps,
    )  # fmt: skip
    scale, zero_point = _numbers(observer, x.reshape(-1, x.shape[-1]))
    numbers = [part.reshape(*x.shape[:-1], 1) for part in (scale, zero_point)]
    levels = decomposed.quantize_per_token(x, *numbers, qmin, qmax, storage)
    back: Tensor = decomposed.dequantize_per_token(levels, *numbers, qmin, qmax, storage, torch.float32)
    return back
