"""The observers, and the named choices of their arguments that configurations are made of."""

from __future__ import annotations

from typing import Any

import torch

from quantc.nn.constructors import Constructor
from quantc.nn.histogram_observer import HistogramObserver
from quantc.nn.range_observers import (
    FixedQParamsObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    NoopObserver,
    Observer,
    ObserverBase,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    RangeObserver,
    RecordingObserver,
    ReuseInputObserver,
    UniformQuantizationObserverBase,
    UnobservedWarning,
    WithoutRange,
    get_observer_state_dict,
    load_observer_state_dict,
    observer_state_dict,
)
from quantc.spec.torch_dtypes import FLOAT_QPARAMS

_WEIGHT: dict[str, Any] = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
_CHANNEL_WEIGHT: dict[str, Any] = {"dtype": torch.qint8, "qscheme": torch.per_channel_symmetric}
_EVEN: dict[str, Any] = {"quant_min": -127, "quant_max": 127, "eps": 2**-12}
"""As many levels above zero as below, and scales that XNNPACK takes."""
_FROM_MINUS_ONE: dict[str, Any] = {"scale": 2.0 / 256.0, "zero_point": 128}
_FROM_ZERO: dict[str, Any] = {"scale": 1.0 / 256.0, "zero_point": 0}

default_observer: Constructor = MinMaxObserver.with_args(quant_min=0, quant_max=127)
default_placeholder_observer = PlaceholderObserver
default_debug_observer = RecordingObserver
default_weight_observer: Constructor = MinMaxObserver.with_args(**_WEIGHT)
weight_observer_range_neg_127_to_127: Constructor = MinMaxObserver.with_args(**_WEIGHT, **_EVEN)
default_histogram_observer: Constructor = HistogramObserver.with_args(quant_min=0, quant_max=127)
default_per_channel_weight_observer: Constructor = PerChannelMinMaxObserver.with_args(**_CHANNEL_WEIGHT)
per_channel_weight_observer_range_neg_127_to_127: Constructor = PerChannelMinMaxObserver.with_args(
    **_CHANNEL_WEIGHT, **_EVEN
)
default_dynamic_quant_observer: Constructor = PlaceholderObserver.with_args(
    dtype=torch.quint8, quant_min=0, quant_max=255, is_dynamic=True
)
default_float_qparams_observer: Constructor = PerChannelMinMaxObserver.with_args(
    dtype=torch.quint8, qscheme=FLOAT_QPARAMS, ch_axis=0
)
default_float_qparams_observer_4bit: Constructor = default_float_qparams_observer.with_args(dtype=torch.quint4x2)
default_fixed_qparams_range_neg1to1_observer: Constructor = FixedQParamsObserver.with_args(**_FROM_MINUS_ONE)
default_fixed_qparams_range_0to1_observer: Constructor = FixedQParamsObserver.with_args(**_FROM_ZERO)
default_symmetric_fixed_qparams_observer = default_fixed_qparams_range_neg1to1_observer
default_affine_fixed_qparams_observer = default_fixed_qparams_range_0to1_observer
default_reuse_input_observer = ReuseInputObserver

__all__ = [
    "FixedQParamsObserver",
    "HistogramObserver",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "Observer",
    "ObserverBase",
    "PerChannelMinMaxObserver",
    "PlaceholderObserver",
    "RangeObserver",
    "RecordingObserver",
    "ReuseInputObserver",
    "UniformQuantizationObserverBase",
    "UnobservedWarning",
    "WithoutRange",
    "default_affine_fixed_qparams_observer",
    "default_debug_observer",
    "default_dynamic_quant_observer",
    "default_fixed_qparams_range_0to1_observer",
    "default_fixed_qparams_range_neg1to1_observer",
    "default_float_qparams_observer",
    "default_float_qparams_observer_4bit",
    "default_histogram_observer",
    "default_observer",
    "default_per_channel_weight_observer",
    "default_placeholder_observer",
    "default_reuse_input_observer",
    "default_symmetric_fixed_qparams_observer",
    "default_weight_observer",
    "get_observer_state_dict",
    "load_observer_state_dict",
    "observer_state_dict",
    "per_channel_weight_observer_range_neg_127_to_127",
    "weight_observer_range_neg_127_to_127",
]
