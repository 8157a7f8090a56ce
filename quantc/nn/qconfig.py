"""QConfig: a constructor of observers for the activations of a layer, and one for its weight; the named ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from quantc.errors import ConfigError, suggest
from quantc.nn.constructors import Constructor
from quantc.nn.fake_quantize import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    default_dynamic_fake_quant,
    default_embedding_fake_quant,
    default_embedding_fake_quant_4bit,
    default_fake_quant,
    default_fused_act_fake_quant,
    default_fused_per_channel_wt_fake_quant,
    default_fused_wt_fake_quant,
    default_per_channel_weight_fake_quant,
    default_weight_fake_quant,
    fused_per_channel_wt_fake_quant_range_neg_127_to_127,
    fused_wt_fake_quant_range_neg_127_to_127,
)
from quantc.nn.observers import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    NoopObserver,
    PlaceholderObserver,
    default_debug_observer,
    default_dynamic_quant_observer,
    default_float_qparams_observer,
    default_float_qparams_observer_4bit,
    default_observer,
    default_per_channel_weight_observer,
    default_placeholder_observer,
    default_reuse_input_observer,
    default_weight_observer,
    per_channel_weight_observer_range_neg_127_to_127,
    weight_observer_range_neg_127_to_127,
)

MakesObserver = Callable[[], nn.Module] | type[nn.Module] | Constructor | None


class _Pair(NamedTuple):
    activation: Any
    weight: Any


class QConfig(_Pair):
    """Quantization of a layer: the factories of its activation and weight observers.

    Both are classes or constructors (`MinMaxObserver.with_args(dtype=torch.qint8)`), never observers: each layer gets its
    own.
    """

    __slots__ = ()

    def __new__(cls, activation: Any, weight: Any) -> Self:
        for name, given in (("activation", activation), ("weight", weight)):
            if isinstance(given, nn.Module):
                raise InstanceError(
                    f"the {name} of {cls.__name__} is an observer, and all layers would share it",
                    advice=f"give the class: {type(given).__name__}, or {type(given).__name__}.with_args(...)",
                )
        return super().__new__(cls, activation, weight)


class InstanceError(ConfigError, ValueError):
    """A config that holds an observer where what makes observers belongs."""


class QConfigDynamic(QConfig):
    """The older name of a QConfig whose activations have scales that are found as the model runs."""

    __slots__ = ()

    def __new__(cls, activation: Any = nn.Identity, weight: Any = nn.Identity) -> Self:
        return super().__new__(cls, activation, weight)


QConfigAny = QConfig | None

default_qconfig = QConfig(default_observer, default_weight_observer)
default_debug_qconfig = QConfig(default_debug_observer, default_weight_observer)
default_per_channel_qconfig = QConfig(default_observer, default_per_channel_weight_observer)
default_dynamic_qconfig = QConfig(default_dynamic_quant_observer, default_weight_observer)
per_channel_dynamic_qconfig = QConfig(default_dynamic_quant_observer, default_per_channel_weight_observer)
float16_dynamic_qconfig = QConfig(
    PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=True),
    PlaceholderObserver.with_args(dtype=torch.float16),
)
float16_static_qconfig = QConfig(
    PlaceholderObserver.with_args(dtype=torch.float16), PlaceholderObserver.with_args(dtype=torch.float16)
)
float_qparams_weight_only_qconfig = QConfig(default_placeholder_observer, default_float_qparams_observer)
float_qparams_weight_only_qconfig_4bit = QConfig(default_placeholder_observer, default_float_qparams_observer_4bit)
default_qat_qconfig = QConfig(default_fake_quant, default_weight_fake_quant)
default_dynamic_qat_qconfig = QConfig(default_dynamic_fake_quant, default_weight_fake_quant)
default_weight_only_qconfig = QConfig(nn.Identity, default_weight_fake_quant)
default_activation_only_qconfig = QConfig(default_fake_quant, nn.Identity)
default_qat_qconfig_v2 = QConfig(default_fused_act_fake_quant, default_fused_wt_fake_quant)
default_reuse_input_qconfig = QConfig(default_reuse_input_observer, NoopObserver)
default_quint8_weight_qconfig = QConfig(HistogramObserver, MinMaxObserver)
default_embedding_qat_qconfig = QConfig(NoopObserver.with_args(dtype=torch.float32), default_embedding_fake_quant)
default_embedding_qat_qconfig_4bit = QConfig(
    NoopObserver.with_args(dtype=torch.float32), default_embedding_fake_quant_4bit
)

_XNNPACK_ACT = HistogramObserver.with_args(dtype=torch.qint8, reduce_range=False, eps=2**-12)
default_symmetric_qnnpack_qconfig = QConfig(_XNNPACK_ACT, weight_observer_range_neg_127_to_127)
default_per_channel_symmetric_qnnpack_qconfig = QConfig(_XNNPACK_ACT, per_channel_weight_observer_range_neg_127_to_127)

_XNNPACK_TRAINED_ACT = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    reduce_range=False,
    eps=2**-12,
)
default_symmetric_qnnpack_qat_qconfig = QConfig(_XNNPACK_TRAINED_ACT, fused_wt_fake_quant_range_neg_127_to_127)
default_per_channel_symmetric_qnnpack_qat_qconfig = QConfig(
    _XNNPACK_TRAINED_ACT, fused_per_channel_wt_fake_quant_range_neg_127_to_127
)


class _Engine(NamedTuple):
    """Differences between the default configs of kernel libraries."""

    reduces_range: bool
    """Activations have 7 bits, so that sums of two products fit 16."""
    by_channel: bool


ENGINES = {
    "fbgemm": _Engine(reduces_range=True, by_channel=True),
    "x86": _Engine(reduces_range=True, by_channel=True),
    "onednn": _Engine(reduces_range=False, by_channel=True),
    "qnnpack": _Engine(reduces_range=False, by_channel=False),
}


class EngineError(ConfigError, AssertionError):
    """A kernel library, or a version of its defaults, that is not known."""


def _engine(backend: str, version: int, versions: tuple[int, ...]) -> _Engine:
    if backend not in ENGINES:
        raise EngineError(f"unknown backend {backend!r}", advice=suggest(str(backend), ENGINES, noun="backends"))
    if version not in versions:
        raise EngineError(f"unknown version {version!r} of the default qconfigs", advice=f"versions: {versions}")
    return ENGINES[backend]


def get_default_qconfig(backend: str = "x86", version: int = 0) -> QConfig:
    """The config for static quantization on a kernel library: x86, fbgemm, onednn or qnnpack."""
    engine = _engine(backend, version, (0,))
    weight = default_per_channel_weight_observer if engine.by_channel else default_weight_observer
    return QConfig(HistogramObserver.with_args(reduce_range=engine.reduces_range), weight)


def get_default_qat_qconfig(backend: str = "x86", version: int = 1) -> QConfig:
    """The config for training on a kernel library. Version 1 observes and rounds in one op, version 0 in several."""
    engine = _engine(backend, version, (0, 1))
    act = FusedMovingAvgObsFakeQuantize if version else FakeQuantize
    by_channel = default_fused_per_channel_wt_fake_quant if version else default_per_channel_weight_fake_quant
    by_tensor = default_fused_wt_fake_quant if version else default_weight_fake_quant
    activation = act.with_args(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, reduce_range=engine.reduces_range
    )
    return QConfig(activation, by_channel if engine.by_channel else by_tensor)


def qconfig_equals(left: QConfigAny, right: QConfigAny) -> bool:
    """True if two configs make the same observers with the same arguments."""
    return left == right
