"""Scale and zero point by a function of the user's own; and the function that observers have for it, to call by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quantc.errors import DataError
from quantc.nn.observers import (
    MinMaxObserver,
    ObserverBase,
    PerChannelMinMaxObserver,
    UniformQuantizationObserverBase,
)
from quantc.spec.spec import FLOAT32_EPS
from quantc.spec.torch_dtypes import FLOAT_QPARAMS, PER_CHANNEL

QParamsFunction = Callable[[Any], tuple[Any, Any]]
"""Computes scale and zero point from an observer with statistics (`min_val`, `max_val`, `quant_min`, `quant_max`, ...)."""


class UserObserver(ObserverBase):
    """An observer whose scale and zero point a function computes.

        UserObserver.with_args(qparams=power_of_two, observer=MinMaxObserver, dtype=torch.quint8)

    `observer` is the class that collects statistics, and keyword arguments are its own. The function's results are checked:
    scales are positive and finite, zero points lie in the range, and there is one of each for a tensor or for a channel.
    """

    def __init__(self, qparams: QParamsFunction, observer: Any = MinMaxObserver, **observer_kwargs: Any) -> None:
        found = observer(**observer_kwargs)
        super().__init__(found.dtype, getattr(found, "is_dynamic", False))
        self.qparams = qparams
        self.activation_post_process = found
        self.qscheme = found.qscheme
        self.quant_min, self.quant_max = found.quant_min, found.quant_max
        self.ch_axis = getattr(found, "ch_axis", -1)

    def forward(self, x: Tensor) -> Tensor:
        seen: Tensor = self.activation_post_process(x)
        return seen

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        found = self.activation_post_process
        scale, zero_point = (torch.as_tensor(value).reshape(-1) for value in self.qparams(found))
        scale = scale.to(torch.float32)
        zero_point = zero_point if self.qscheme == FLOAT_QPARAMS else zero_point.to(torch.int32)
        reason = self._why_not(scale, zero_point)
        if reason is not None:
            raise DataError(
                f"the qparams function {_name(self.qparams)} gave scale {scale.tolist()} and zero point "
                f"{zero_point.tolist()}: {reason}",
                where=f"{type(found).__name__}, {self.dtype}",
                advice=f"give a positive finite scale, and a zero point in {self.quant_min}..{self.quant_max}",
            )
        return scale, zero_point

    def _why_not(self, scale: Tensor, zero_point: Tensor) -> str | None:
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            return "a scale must be a positive finite number"
        if scale.shape != zero_point.shape:
            return "there must be as many scales as zero points"
        if scale.numel() != 1 and self.qscheme not in PER_CHANNEL:
            return "a tensor has one scale"
        if self.qscheme == FLOAT_QPARAMS:
            return None
        inside = (zero_point >= self.quant_min) & (zero_point <= self.quant_max)
        return None if bool(inside.all()) else "zero must be exact, so the zero point must be a level"


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _calculate_qparams(
    min_val: Tensor,
    max_val: Tensor,
    dtype: torch.dtype = torch.quint8,
    qscheme: torch.qscheme = torch.per_tensor_affine,
    quant_min: int | None = None,
    quant_max: int | None = None,
    reduce_range: bool = False,
    eps: float = FLOAT32_EPS,
) -> tuple[Tensor, Tensor]:
    """Scale and zero point of a range, or of one range for each channel, such that zero is exact."""
    kind = PerChannelMinMaxObserver if qscheme in PER_CHANNEL else MinMaxObserver
    observer: UniformQuantizationObserverBase = kind(
        dtype=dtype, qscheme=qscheme, reduce_range=reduce_range, quant_min=quant_min, quant_max=quant_max, eps=eps
    )
    return observer._calculate_qparams(min_val, max_val)
