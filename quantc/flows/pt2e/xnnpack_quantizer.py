"""`XNNPACKQuantizer`, for ExecuTorch's XNNPACK delegate: what its table says, under the names of ExecuTorch."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch

from quantc.annotate.quantizer import Backend
from quantc.backends.executorch import EXECUTORCH
from quantc.flows.pt2e.backend_quantizer import BackendQuantizer
from quantc.flows.pt2e.quantizer import QuantizationConfig, QuantizationSpec
from quantc.nn.fake_quantize import FakeQuantize, FusedMovingAvgObsFakeQuantize
from quantc.nn.observers import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)

EPS = 2.0**-12
"""The smallest scale that the delegate takes."""


@cache
def get_symmetric_quantization_config(
    is_per_channel: bool = False,
    is_qat: bool = False,
    is_dynamic: bool = False,
    act_qmin: int = -128,
    act_qmax: int = 127,
    weight_qmin: int = -127,
    weight_qmax: int = 127,
) -> QuantizationConfig:
    """Activations int8 affine, weights int8 symmetric. Dynamic: the scales of activations are found as the model runs,
    and results stay float."""
    act = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=_act_observer(is_qat, is_dynamic),
        quant_min=act_qmin,
        quant_max=act_qmax,
        qscheme=torch.per_tensor_affine,
        is_dynamic=is_dynamic,
    )
    weight = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=_weight_observer(is_qat, is_per_channel),
        quant_min=weight_qmin,
        quant_max=weight_qmax,
        qscheme=torch.per_channel_symmetric if is_per_channel else torch.per_tensor_symmetric,
        ch_axis=0,
    )
    return QuantizationConfig(act, None if is_dynamic else act, weight, None, is_qat)


def _act_observer(is_qat: bool, is_dynamic: bool) -> Any:
    if is_qat and is_dynamic:
        return FakeQuantize.with_args(observer=MovingAverageMinMaxObserver.with_args(averaging_constant=1), eps=EPS)
    if is_qat:
        return FusedMovingAvgObsFakeQuantize.with_args(eps=EPS)
    return (PlaceholderObserver if is_dynamic else HistogramObserver).with_args(eps=EPS)


def _weight_observer(is_qat: bool, is_per_channel: bool) -> Any:
    if is_qat:
        observer = MovingAveragePerChannelMinMaxObserver if is_per_channel else MovingAverageMinMaxObserver
        # not torch's fused one: while it trains, its symmetric scales are 255/254 of what it says they are afterwards
        return FakeQuantize.with_args(eps=EPS, observer=observer)
    return (PerChannelMinMaxObserver if is_per_channel else MinMaxObserver).with_args(eps=EPS)


def known_configs() -> list[QuantizationConfig]:
    """Every config that `get_symmetric_quantization_config` gives with its default ranges."""
    choices = [
        (channel, qat, dynamic) for channel in (False, True) for qat in (False, True) for dynamic in (False, True)
    ]
    return [get_symmetric_quantization_config(*choice) for choice in choices]


class XNNPACKQuantizer(BackendQuantizer):
    """Quantizes what ExecuTorch's XNNPACK delegate takes."""

    backend: ClassVar[Backend] = EXECUTORCH
    known_configs = staticmethod(known_configs)


__all__ = ["XNNPACKQuantizer", "get_symmetric_quantization_config"]
