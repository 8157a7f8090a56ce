"""Observers as modules, under torch's names, on the engine's numbers.

An observer returns its input and keeps the range in buffers, so that state dicts hold it; `calculate_qparams()` computes
scale and zero point from that. The same data gives the same bits as torch's observers, whose state dicts load here and the
other way round. NaN is refused at once.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from quantc.errors import DataError, ObservationError, SpecError
from quantc.nn.constructors import Constructible
from quantc.nn.scripting import refuse_observer
from quantc.spec.formats import Role, Scheme
from quantc.spec.granularity import extremes
from quantc.spec.numerics import qparams_of_sound_range
from quantc.spec.spec import FLOAT32_EPS, QuantSpec
from quantc.spec.torch_dtypes import (
    FLOAT_QPARAMS,
    PER_CHANNEL,
    PER_TENSOR,
    SYMMETRIC,
    format_of,
    granularity_of,
    integer_range,
    scheme_of,
)


class UnobservedWarning(UserWarning):
    """Scale and zero point were asked of an observer that has seen no data."""


def default_qparams(observer: nn.Module) -> tuple[Tensor, Tensor]:
    """Scale 1 and zero point 0, with a warning: the qparams of an observer without data."""
    warnings.warn(
        f"{type(observer).__name__} has seen no data, so its scale is 1 and its zero point 0: run the model on data first",
        UnobservedWarning,
        stacklevel=3,
    )
    return torch.tensor([1.0]), torch.tensor([0])


class ObserverBase(nn.Module, Constructible):
    """Base of all observers: dtype, static or dynamic qparams, and `calculate_qparams`."""

    place: str | None = None
    """The tensor it observes, for messages; set by flows that know."""
    __prepare_scriptable__ = refuse_observer

    def __init__(self, dtype: Any, is_dynamic: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_dynamic = is_dynamic

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Look at a tensor and give it back."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero point, one element each for a whole tensor, or one for each channel."""


Observer = ObserverBase
"""The older name."""


class UniformQuantizationObserverBase(ObserverBase):
    """Observers that make an evenly spaced grid of a range."""

    _version = 3  # of the buffers' names, as torch counts them
    schemes: ClassVar[tuple[Any, ...]] = (*PER_TENSOR, *PER_CHANNEL)
    eps: Tensor

    def __init__(
        self,
        dtype: Any = torch.quint8,
        qscheme: Any = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: Mapping[str, Any] | None = None,
        eps: float = FLOAT32_EPS,
        is_dynamic: bool = False,
        ch_axis: int = 0,
    ) -> None:
        super().__init__(dtype, is_dynamic)
        if qscheme not in self.schemes:
            raise SpecError(
                f"{type(self).__name__} does not go with {qscheme}",
                advice=f"take one of: {', '.join(map(str, self.schemes))}",
            )
        self.qscheme = qscheme
        self.reduce_range = reduce_range
        self.has_customized_qrange = quant_min is not None and quant_max is not None
        self.quant_min, self.quant_max = integer_range(dtype, quant_min, quant_max, reduce_range)
        if reduce_range and qscheme in SYMMETRIC and dtype in (torch.quint8, torch.uint8):
            raise SpecError(
                "the range of unsigned numbers cannot be reduced where it is symmetric", advice="take a signed dtype"
            )
        self._ch_axis = ch_axis
        self.factory_kwargs = dict(factory_kwargs or {})
        self.register_buffer("eps", torch.tensor([eps], **self.factory_kwargs))
        self.spec = self._spec()
        self.register_load_state_dict_pre_hook(_make_room)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_post_hook(_take_eps)  # type: ignore[no-untyped-call]

    @property
    def ch_axis(self) -> int:
        """The axis of the channels. Callers that know the op may set it before any data is seen."""
        return self._ch_axis

    @ch_axis.setter
    def ch_axis(self, axis: int) -> None:
        self._ch_axis = axis
        self.spec = self._spec()

    def _spec(self) -> QuantSpec:
        fmt = format_of(self.dtype)
        return QuantSpec(
            dtype=fmt,
            scheme=Scheme.SYMMETRIC if fmt.is_float else scheme_of(self.qscheme),
            granularity=granularity_of(self.qscheme, self.ch_axis),
            role=Role.ACT,
            qmin=self.quant_min,
            qmax=self.quant_max,
            eps=float(self.eps),
        )

    def _calculate_qparams(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point of ranges."""
        if not min_val.numel() or bool(((min_val == torch.inf) & (max_val == -torch.inf)).all()):
            return default_qparams(self)
        if not bool((min_val <= max_val).all()):
            raise DataError(
                f"{type(self).__name__} has seen NaN: its range is {min_val.tolist()}..{max_val.tolist()}",
                where=self.place,
                advice="look for the op that makes it, correct the model or the data, and calibrate again",
            )
        if self.qscheme is FLOAT_QPARAMS or self.qscheme == FLOAT_QPARAMS:
            return _float_qparams(min_val, max_val, self.quant_max - self.quant_min, self.eps)
        if self.spec.dtype.is_float and self.qscheme not in SYMMETRIC:
            return _shifted_qparams(min_val, max_val, (self.quant_min, self.quant_max), self.eps)
        found = qparams_of_sound_range(min_val, max_val, self.spec)
        zero_point = found.zero_point
        if scheme_of(self.qscheme) is not scheme_of(torch.per_tensor_symmetric):
            zero_point = zero_point.to(torch.int32)
        elif self.has_customized_qrange and self.quant_min == 0:
            zero_point = torch.full_like(zero_point, self.quant_max // 2)  # a given range has its lower middle
        return found.scale.reshape(-1), zero_point.reshape(-1)

    @abstractmethod
    def reset_min_max_vals(self) -> None:
        """Forget what was seen."""


def _make_room(observer: UniformQuantizationObserverBase, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Resize the buffers of an observer to the shapes being loaded; convert files of older versions."""
    state.setdefault(f"{prefix}eps", observer.eps)
    for name in ("min_val", "max_val"):
        if f"{prefix}{name}s" in state:
            state[f"{prefix}{name}"] = state.pop(f"{prefix}{name}s")
        loaded, buffer = state.get(f"{prefix}{name}"), getattr(observer, name, None)
        if loaded is None or buffer is None:
            continue
        if observer.qscheme in PER_CHANNEL:
            buffer.resize_(loaded.shape)
        elif not loaded.numel():
            state[f"{prefix}{name}"] = torch.full_like(buffer, torch.inf if name == "min_val" else -torch.inf)
        else:
            state[f"{prefix}{name}"] = loaded.reshape(buffer.shape)


def _take_eps(observer: UniformQuantizationObserverBase, _: Any) -> None:
    observer.spec = observer._spec()


def _float_qparams(low: Tensor, high: Tensor, levels: int, eps: Tensor) -> tuple[Tensor, Tensor]:
    scale = (high - low) / float(levels)
    scale = torch.where(scale > eps, scale, torch.ones_like(scale))
    return scale.reshape(-1), (-1 * low / scale).reshape(-1)


def _shifted_qparams(low: Tensor, high: Tensor, ends: tuple[int, int], eps: Tensor) -> tuple[Tensor, Tensor]:
    """Qparams of 8-bit floats in an affine scheme, as in torch: the range is shifted onto that of the format."""
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = torch.maximum((high - low) / float(ends[1] - ends[0]), eps)
    zero_point = (ends[0] - torch.round(low / scale).to(torch.int32)).clamp(*ends)
    return scale.reshape(-1), zero_point.reshape(-1)


def has_numbers(x: Tensor) -> bool:
    """True if a tensor's elements can be read: it is neither fake nor meta, and nothing is being compiled."""
    return not (torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta)


class RangeObserver(UniformQuantizationObserverBase):
    """Keeps the smallest and the largest value in the buffers `min_val` and `max_val`.

    What one batch's range does to the range so far is all that its kinds differ in.
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.register_buffer("min_val", self._nothing(torch.inf))
        self.register_buffer("max_val", self._nothing(-torch.inf))

    def _nothing(self, end: float) -> Tensor:
        """A range that has seen nothing: torch has no elements at all by channel, and an infinite one by tensor."""
        by_channel = self.qscheme in PER_CHANNEL
        return torch.tensor([] if by_channel else end, **self.factory_kwargs)

    @property
    def has_seen(self) -> bool:
        """True if it has seen data."""
        return self.min_val.numel() > 0 and bool((self.min_val <= self.max_val).all())

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        low, high = extremes(x.detach().to(self.min_val.dtype), self.spec.granularity)
        if has_numbers(x):
            self._refuse_non_finite(low, high)
        is_first = not self.min_val.numel() or (has_numbers(x) and not self.has_seen)
        if not is_first:
            low, high = self._join(low, high)
        self._set(low, high)
        return x

    def _set(self, low: Tensor, high: Tensor) -> None:
        if self.min_val.shape != low.shape:
            self.min_val.resize_(low.shape)
            self.max_val.resize_(high.shape)
        self.min_val.copy_(low)
        self.max_val.copy_(high)

    def _join(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """The range so far and that of a batch, in one."""
        return torch.minimum(self.min_val, low), torch.maximum(self.max_val, high)

    def _refuse_non_finite(self, low: Tensor, high: Tensor) -> None:
        if not bool(torch.isfinite(high - low).all()):
            raise DataError(
                f"{type(self).__name__} was given NaN or infinity",
                where=self.place,
                advice="look for the op that makes it, and correct the model or the data",
            )

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self._calculate_qparams(self.min_val, self.max_val)

    def reset_min_max_vals(self) -> None:
        self._set(self._nothing(torch.inf), self._nothing(-torch.inf))

    def extra_repr(self) -> str:
        return f"min_val={self.min_val}, max_val={self.max_val}"


class MinMaxObserver(RangeObserver):
    """The range of all that was seen, for whole tensors."""

    schemes = PER_TENSOR


class PerChannelMinMaxObserver(RangeObserver):
    """The range of all that was seen, for each channel along `ch_axis`."""

    schemes = PER_CHANNEL

    def __init__(
        self, ch_axis: int = 0, dtype: Any = torch.quint8, qscheme: Any = torch.per_channel_affine, **keywords: Any
    ) -> None:
        _refuse_dynamic(self, keywords.get("is_dynamic", False))
        super().__init__(dtype=dtype, qscheme=qscheme, ch_axis=ch_axis, **keywords)


class _Following(RangeObserver):
    """A range that each batch moves by `averaging_constant` of the way to its own."""

    averaging_constant: float

    def _join(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        rate = self.averaging_constant
        return self.min_val + rate * (low - self.min_val), self.max_val + rate * (high - self.max_val)


class MovingAverageMinMaxObserver(_Following, MinMaxObserver):
    """A moving average of each batch's range, for whole tensors."""

    def __init__(
        self,
        averaging_constant: float = 0.01,
        dtype: Any = torch.quint8,
        qscheme: Any = torch.per_tensor_affine,
        **keywords: Any,
    ) -> None:
        if averaging_constant != 1:
            _refuse_dynamic(self, keywords.get("is_dynamic", False))
        super().__init__(dtype, qscheme, **keywords)
        self.averaging_constant = averaging_constant


class MovingAveragePerChannelMinMaxObserver(_Following, PerChannelMinMaxObserver):
    """A moving average of each batch's range, for each channel along `ch_axis`."""

    def __init__(
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = 0,
        dtype: Any = torch.quint8,
        qscheme: Any = torch.per_channel_affine,
        **keywords: Any,
    ) -> None:
        super().__init__(ch_axis, dtype, qscheme, **keywords)
        self.averaging_constant = averaging_constant


def _refuse_dynamic(observer: nn.Module, is_dynamic: bool) -> None:
    if is_dynamic:
        raise SpecError(
            f"{type(observer).__name__} keeps what it has seen, and dynamic scales are those of the tensor at hand",
            advice="take PlaceholderObserver with is_dynamic=True",
        )


class FixedQParamsObserver(ObserverBase):
    """Scale and zero point that are known beforehand, as for the output of a sigmoid."""

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        scale: float,
        zero_point: int,
        dtype: Any = torch.quint8,
        qscheme: Any = torch.per_tensor_affine,
        quant_min: int = 0,
        quant_max: int = 255,
        is_dynamic: bool = False,
    ) -> None:
        _refuse_dynamic(self, is_dynamic)
        super().__init__(dtype)
        self.quant_min, self.quant_max, self.qscheme = quant_min, quant_max, qscheme
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor([zero_point], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point


class WithoutRange(ObserverBase):
    """Base of observers without a scale."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        raise ObservationError(
            f"{type(self).__name__} keeps no range, so it has no scale",
            advice="take MinMaxObserver or HistogramObserver",
        )


class PlaceholderObserver(WithoutRange):
    """A dtype without statistics: for float16, and for run-time scales."""

    def __init__(
        self,
        dtype: Any = torch.float32,
        custom_op_name: str = "",
        compute_dtype: Any = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: Any = None,
        eps: float | None = None,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(dtype, is_dynamic or bool(compute_dtype))
        self.qscheme = torch.per_tensor_affine if qscheme is None else qscheme
        self.quant_min, self.quant_max = quant_min, quant_max
        self.eps = FLOAT32_EPS if eps is None else eps
        self.custom_op = custom_op_name

    def extra_repr(self) -> str:
        return f"dtype={self.dtype}, is_dynamic={self.is_dynamic}"


class RecordingObserver(WithoutRange):
    """Keeps every tensor it is given, for inspection."""

    def __init__(self, dtype: Any = torch.quint8) -> None:
        super().__init__(dtype)
        self.tensor_val: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.tensor_val.append(x.detach().clone())
        return x

    def get_tensor_value(self) -> list[Tensor]:
        return self.tensor_val


class NoopObserver(WithoutRange):
    """Looks at nothing; says the dtype."""

    def __init__(self, dtype: Any = torch.float16, custom_op_name: str = "") -> None:
        super().__init__(dtype)
        self.custom_op = custom_op_name


class ReuseInputObserver(WithoutRange):
    """For ops that hand their input on, such as reshape: the output has the observer of the input."""

    def __init__(self) -> None:
        super().__init__(torch.quint8)


def observer_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The part of a model's state dict that its observers hold."""
    return {name: value for name, value in module.state_dict().items() if "activation_post_process" in name}


def load_observer_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give the observers of a model what `observer_state_dict` of a like one held. Missing and unknown names are refused."""
    missing, unexpected = module.load_state_dict(dict(state), strict=False)
    lost = [name for name in missing if "activation_post_process" in name] + list(unexpected)
    if lost:
        raise ObservationError(
            f"the observers of the model and of the state dict differ in {', '.join(lost[:5])}",
            advice="prepare both models in the same way",
        )


get_observer_state_dict = observer_state_dict
