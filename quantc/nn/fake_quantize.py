"""Fake quantization as modules, under the names they have in torch: round to the grid in training, and observe.

They compute with torch's own ops for it, so gradients and numbers are those of torch's modules.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from quantc.errors import SpecError
from quantc.nn.constructors import Constructible, Constructor
from quantc.nn.observers import (
    HistogramObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
)
from quantc.nn.scripting import refuse_observer
from quantc.spec.torch_dtypes import FLOAT_QPARAMS, FORMATS, PER_CHANNEL, SYMMETRIC


class FakeQuantizeBase(nn.Module, Constructible):
    """Base of all fake quantizers: two switches, which state dicts hold."""

    fake_quant_enabled: Tensor
    observer_enabled: Tensor
    __prepare_scriptable__ = refuse_observer

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.uint8))
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.uint8))

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor and round it to the grid."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point."""

    def enable_fake_quant(self, enabled: bool = True) -> None:
        self.fake_quant_enabled[0] = int(enabled)

    def disable_fake_quant(self) -> None:
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        self.observer_enabled[0] = int(enabled)

    def disable_observer(self) -> None:
        self.enable_observer(False)


class FakeQuantize(FakeQuantizeBase):
    """Rounds to the grid whose scale an observer finds. Gradients pass where nothing was clipped."""

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        observer: Any = MovingAverageMinMaxObserver,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        if quant_min is not None and quant_max is not None:
            _check_range(_dtype_of(observer, observer_kwargs), quant_min, quant_max)
            observer_kwargs |= {"quant_min": quant_min, "quant_max": quant_max}
        found = observer(**observer_kwargs, is_dynamic=is_dynamic)
        self.activation_post_process = found
        self.quant_min, self.quant_max, self.is_dynamic = found.quant_min, found.quant_max, found.is_dynamic
        self.dtype, self.qscheme, self.ch_axis = found.dtype, found.qscheme, getattr(found, "ch_axis", -1)
        self.is_per_channel = self.qscheme in PER_CHANNEL
        if not self.is_per_channel:
            self.ch_axis = -1
        zero_point_dtype = torch.float32 if self.qscheme == FLOAT_QPARAMS else torch.int32
        self.register_buffer("scale", torch.tensor([1.0]))
        self.register_buffer("zero_point", torch.tensor([0], dtype=zero_point_dtype))
        self.register_load_state_dict_pre_hook(_make_room)  # type: ignore[no-untyped-call]

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.activation_post_process.calculate_qparams()
        return found

    def forward(self, x: Tensor) -> Tensor:
        if self.observer_enabled[0] == 1:
            self.activation_post_process(x.detach())
            self._take(*self.calculate_qparams())
        if self.fake_quant_enabled[0] != 1:
            return x
        ends = (self.quant_min, self.quant_max)
        if self.is_per_channel:
            return torch.fake_quantize_per_channel_affine(x, self.scale, self.zero_point, self.ch_axis, *ends)
        return torch.fake_quantize_per_tensor_affine(x, self.scale, self.zero_point, *ends)

    def _take(self, scale: Tensor, zero_point: Tensor) -> None:
        if self.scale.shape != scale.shape:
            self.scale.resize_(scale.shape)
            self.zero_point.resize_(zero_point.shape)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def extra_repr(self) -> str:
        return (
            f"fake_quant_enabled={self.fake_quant_enabled}, observer_enabled={self.observer_enabled}, "
            f"quant_min={self.quant_min}, quant_max={self.quant_max}, dtype={self.dtype}, qscheme={self.qscheme}, "
            f"ch_axis={self.ch_axis}, scale={self.scale}, zero_point={self.zero_point}"
        )


def _make_room(fake: FakeQuantize, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Resize scale and zero point to the shapes being loaded."""
    for name in ("scale", "zero_point"):
        if f"{prefix}{name}" in state:
            getattr(fake, name).resize_(state[f"{prefix}{name}"].shape)


def _dtype_of(observer: Any, keywords: dict[str, Any]) -> torch.dtype:
    """The dtype an observer will have: that of its constructor, unless it is given here."""
    given = getattr(getattr(observer, "p", None), "keywords", {})
    dtype: torch.dtype = keywords.get("dtype", given.get("dtype", torch.quint8))
    return dtype


def _check_range(dtype: torch.dtype, low: int, high: int) -> None:
    fmt = FORMATS.get(dtype)
    if low > high or (fmt is not None and not fmt.qmin <= low <= high <= fmt.qmax):
        raise SpecError(
            f"{low}..{high} is not a range of {dtype}", advice="give quant_min and quant_max that it can hold"
        )


class FixedQParamsFakeQuantize(FakeQuantize):
    """Rounds to a grid that is known beforehand."""

    def __init__(self, observer: Any) -> None:
        super().__init__(observer=observer)
        if not (hasattr(self.activation_post_process, "scale") and hasattr(self.activation_post_process, "zero_point")):
            raise SpecError(
                f"{type(self.activation_post_process).__name__} has no fixed scale",
                advice="give a FixedQParamsObserver",
            )
        self.scale = self.activation_post_process.scale
        self.zero_point = self.activation_post_process.zero_point

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """A moving average of the range, its scale and the rounding in one op."""

    def __init__(
        self,
        observer: Any = MovingAverageMinMaxObserver,
        quant_min: int = 0,
        quant_max: int = 255,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__(observer, quant_min, quant_max, **observer_kwargs)
        if not hasattr(self.activation_post_process, "averaging_constant"):
            raise SpecError(
                f"{type(self.activation_post_process).__name__} is not a moving average, and this op computes one",
                advice="take MovingAverageMinMaxObserver, or FakeQuantize with this observer",
            )
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.int64))
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.int64))
        self.is_symmetric_quant = self.qscheme in SYMMETRIC

    def forward(self, x: Tensor) -> Tensor:
        observer = self.activation_post_process
        return torch.fused_moving_avg_obs_fake_quant(
            x,
            self.observer_enabled,
            self.fake_quant_enabled,
            observer.min_val,
            observer.max_val,
            self.scale,
            self.zero_point,
            observer.averaging_constant,
            self.quant_min,
            self.quant_max,
            self.ch_axis,
            self.is_per_channel,
            self.is_symmetric_quant,
        )


def _switch(name: str) -> Any:
    def apply(module: nn.Module) -> None:
        if isinstance(module, FakeQuantizeBase):
            getattr(module, name)()

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"`model.apply({name})` does so in all fake quantizers of a model."
    return apply


disable_fake_quant = _switch("disable_fake_quant")
enable_fake_quant = _switch("enable_fake_quant")
disable_observer = _switch("disable_observer")
enable_observer = _switch("enable_observer")


_ACT: dict[str, Any] = {"observer": MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255}
_WEIGHT: dict[str, Any] = {
    "observer": MovingAverageMinMaxObserver,
    "quant_min": -128,
    "quant_max": 127,
    "dtype": torch.qint8,
    "qscheme": torch.per_tensor_symmetric,
}
_CHANNEL_WEIGHT: dict[str, Any] = {
    **_WEIGHT,
    "observer": MovingAveragePerChannelMinMaxObserver,
    "qscheme": torch.per_channel_symmetric,
}
_EVEN: dict[str, Any] = {"quant_min": -127, "eps": 2**-12}
_EMBEDDING: dict[str, Any] = {
    "observer": MovingAveragePerChannelMinMaxObserver,
    "qscheme": FLOAT_QPARAMS,
    "ch_axis": 0,
    "averaging_constant": 1,
}

default_fake_quant: Constructor = FakeQuantize.with_args(**_ACT, dtype=torch.quint8, reduce_range=True)
default_weight_fake_quant: Constructor = FakeQuantize.with_args(**_WEIGHT, reduce_range=False)
default_dynamic_fake_quant: Constructor = FakeQuantize.with_args(
    **_ACT, is_dynamic=True, dtype=torch.quint8, averaging_constant=1
)
default_fixed_qparams_range_neg1to1_fake_quant: Constructor = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_neg1to1_observer
)
default_fixed_qparams_range_0to1_fake_quant: Constructor = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_0to1_observer
)
default_symmetric_fixed_qparams_fake_quant = default_fixed_qparams_range_neg1to1_fake_quant
default_affine_fixed_qparams_fake_quant = default_fixed_qparams_range_0to1_fake_quant
default_per_channel_weight_fake_quant: Constructor = FakeQuantize.with_args(**_CHANNEL_WEIGHT, reduce_range=False)
default_embedding_fake_quant: Constructor = FakeQuantize.with_args(
    **_EMBEDDING, dtype=torch.quint8, quant_min=0, quant_max=255
)
default_embedding_fake_quant_4bit: Constructor = FakeQuantize.with_args(**_EMBEDDING, dtype=torch.quint4x2)
default_histogram_fake_quant: Constructor = default_fake_quant.with_args(observer=HistogramObserver)
default_fused_act_fake_quant: Constructor = FusedMovingAvgObsFakeQuantize.with_args(**_ACT, dtype=torch.quint8)
default_fused_wt_fake_quant: Constructor = FusedMovingAvgObsFakeQuantize.with_args(**_WEIGHT)
default_fused_per_channel_wt_fake_quant: Constructor = FusedMovingAvgObsFakeQuantize.with_args(**_CHANNEL_WEIGHT)
fused_wt_fake_quant_range_neg_127_to_127: Constructor = default_fused_wt_fake_quant.with_args(**_EVEN)
fused_per_channel_wt_fake_quant_range_neg_127_to_127: Constructor = default_fused_per_channel_wt_fake_quant.with_args(
    **_EVEN
)
