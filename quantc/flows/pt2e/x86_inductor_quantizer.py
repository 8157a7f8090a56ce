"""`X86Quantizer`, for inductor's and quantc's kernels on x86, under the names of torchao."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Self

import torch
from torch import nn

from quantc.annotate.quantizer import Backend
from quantc.backends.x86 import X86
from quantc.flows.pt2e.backend_quantizer import BackendQuantizer
from quantc.flows.pt2e.quantizer import QuantizationConfig, QuantizationSpec
from quantc.nn.fake_quantize import FakeQuantize, FusedMovingAvgObsFakeQuantize
from quantc.nn.observers import (
    HistogramObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)

EPS = 2.0**-12


@cache
def get_default_x86_inductor_quantization_config(
    is_qat: bool = False, is_dynamic: bool = False, reduce_range: bool = False
) -> QuantizationConfig:
    """Activations uint8 affine, weights int8 symmetric by channel. `reduce_range` leaves a bit of activations unused,
    for processors that add two products in 16 bits."""
    act = QuantizationSpec(
        dtype=torch.uint8,
        observer_or_fake_quant_ctr=_act_observer(is_qat, is_dynamic),
        quant_min=0,
        quant_max=127 if reduce_range else 255,
        qscheme=torch.per_tensor_affine,
        is_dynamic=is_dynamic,
    )
    observer: Any = PerChannelMinMaxObserver.with_args(eps=EPS)
    if is_qat:
        # not torch's fused one: while it trains, its symmetric scales are not what it says they are afterwards
        observer = FakeQuantize.with_args(observer=MovingAveragePerChannelMinMaxObserver, eps=EPS)
    weight = QuantizationSpec(
        dtype=torch.int8,
        observer_or_fake_quant_ctr=observer,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )
    return QuantizationConfig(act, None if is_dynamic else act, weight, None, is_qat)


def _act_observer(is_qat: bool, is_dynamic: bool) -> Any:
    if is_qat and is_dynamic:
        return FakeQuantize.with_args(observer=MovingAverageMinMaxObserver.with_args(averaging_constant=1), eps=EPS)
    if is_qat:
        return FusedMovingAvgObsFakeQuantize.with_args(eps=EPS)
    return (PlaceholderObserver if is_dynamic else HistogramObserver).with_args(eps=EPS)


def known_configs() -> list[QuantizationConfig]:
    """Every config that `get_default_x86_inductor_quantization_config` gives."""
    choices = [(qat, dynamic) for qat in (False, True) for dynamic in (False, True)]
    return [get_default_x86_inductor_quantization_config(*choice) for choice in choices]


class X86Quantizer(BackendQuantizer):
    """Quantizes what kernels on x86 take: products read uint8 and yield float, which the next product quantizes."""

    backend: ClassVar[Backend] = X86
    known_configs = staticmethod(known_configs)

    def set_function_type_qconfig(
        self, function_type: Callable[..., Any], quantization_config: QuantizationConfig | None
    ) -> Self:
        """For the calls of a function, such as `torch.nn.functional.linear`: `set_operator_type`, as torchao calls it."""
        return self.set_operator_type(function_type, quantization_config)

    def set_module_type_qconfig(
        self, module_type: type[nn.Module], quantization_config: QuantizationConfig | None
    ) -> Self:
        """For all that is in modules of a class: `set_module_type`, as torchao calls it."""
        return self.set_module_type(module_type, quantization_config)

    def set_module_name_qconfig(self, module_name: str, quantization_config: QuantizationConfig | None) -> Self:
        """For all that is in a module: `set_module_name`, as torchao calls it."""
        return self.set_module_name(module_name, quantization_config)


X86InductorQuantizer = X86Quantizer

__all__ = ["X86InductorQuantizer", "X86Quantizer", "get_default_x86_inductor_quantization_config"]
