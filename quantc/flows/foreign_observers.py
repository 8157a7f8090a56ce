"""Observers that others wrote, as the engine sees them: a spec, and an observation.

Any module serves that has the attributes torch's observers have (`dtype`, `qscheme`, `quant_min`, `quant_max`, `ch_axis`,
`eps`, `is_dynamic`) and `calculate_qparams()`: quantc's own, torch's, torchao's. None of those packages is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quantc.errors import LoadError, ObservationError, SpecError
from quantc.nn.range_observers import WithoutRange
from quantc.spec.formats import PerTensor, Role, Timing
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.observation import Order, State, check_mergeable, check_spec, refuse_empty
from quantc.spec.spec import FLOAT32_EPS, Observe, Option, QuantSpec
from quantc.spec.torch_dtypes import PER_CHANNEL, format_of, granularity_of, integer_range, scheme_of


def inner(observer: Any) -> Any:
    """The observer inside a fake quantizer; any other observer itself."""
    found = getattr(observer, "activation_post_process", None)
    return observer if found is None else found


def is_observer(module: object) -> bool:
    """True for a module with `calculate_qparams`."""
    return isinstance(module, nn.Module) and callable(getattr(module, "calculate_qparams", None))


def has_seen(observer: Any) -> bool:
    """True if an observer has seen data, as far as its buffers tell, or has a fixed scale."""
    observer = inner(observer)
    low, high = getattr(observer, "min_val", None), getattr(observer, "max_val", None)
    if isinstance(low, Tensor) and isinstance(high, Tensor):
        return low.numel() > 0 and bool((low <= high).all())
    return isinstance(getattr(observer, "scale", None), Tensor)


def spec_of(observer: Any, role: Role = Role.ACT) -> QuantSpec:
    """The spec that an observer or its factory stands for.

    Float zero points (`per_channel_affine_float_qparams`) become a per-channel affine spec: the engine's are integers.
    """
    found = observer if isinstance(observer, nn.Module) else observer()
    if getattr(found, "dtype", None) is None:
        raise SpecError(f"{type(found).__name__} has no dtype, so it says nothing of how a tensor is quantized")
    asked = inner(found)
    dtype = format_of(asked.dtype)
    qscheme = getattr(asked, "qscheme", torch.per_tensor_affine)
    low, high = getattr(asked, "quant_min", None), getattr(asked, "quant_max", None)
    if low is None or high is None:
        low, high = integer_range(asked.dtype, None, None, bool(getattr(asked, "reduce_range", False)))
    fields: dict[str, Any] = {"dtype": dtype, "role": role, "observe": _observe(asked)}
    if dtype.is_float:
        weight_only = {"timing": Timing.WEIGHT_ONLY} if role is Role.WEIGHT else {}
        return QuantSpec.model_validate(fields | weight_only)
    dynamic = {"timing": Timing.DYNAMIC} if getattr(asked, "is_dynamic", False) else {}
    shape = {"scheme": scheme_of(qscheme), "granularity": granularity_of(qscheme, getattr(asked, "ch_axis", 0))}
    numbers = {"qmin": low, "qmax": high, "eps": float(getattr(asked, "eps", FLOAT32_EPS))}
    return QuantSpec.model_validate(fields | dynamic | shape | numbers)


OBSERVED_AS = {"HistogramObserver": "histogram", "RecordingObserver": "recording"}
"""The engine's name of an observer's statistics, by the name of its class; minmax for all others."""


def _observe(observer: Any) -> Observe:
    scale, zero_point = getattr(observer, "scale", None), getattr(observer, "zero_point", None)
    if isinstance(scale, Tensor) and isinstance(zero_point, Tensor) and scale.numel() == 1:
        return Observe(name="fixed", options=(("scale", float(scale)), ("zero_point", int(zero_point))))
    rate = getattr(observer, "averaging_constant", None)
    if isinstance(rate, int | float):
        return Observe(name="moving-average", options=(("rate", float(rate)),))
    return Observe(name=OBSERVED_AS.get(type(observer).__name__, "minmax"))


class FoundQParams(WithoutRange):
    """An observer restored from a file: its scale and zero point, without statistics."""

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, zero_point: Tensor) -> None:
        super().__init__(None)
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    def forward(self, x: Tensor) -> Tensor:
        raise ObservationError(
            "an observer that was read from a file has its scale and nothing to go on from",
            advice="prepare and calibrate again",
        )

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        return self.scale, self.zero_point


@dataclass(eq=False, slots=True)
class ObservedBy:
    """An observation that an observer module makes. What it finds is what the module says, whatever the spec's `observe`.

    Modules cannot be merged, so the data must come in one order in one process.
    """

    statistics: ClassVar[str] = "module"
    order: ClassVar[Order] = Order.MATTERS

    observer: nn.Module
    share: Share = field(default_factory=PerTensor)
    counted: int = 0
    non_finite: int = 0

    @classmethod
    def of(cls, observer: nn.Module) -> Self:
        """The observation of an observer, which may have seen data already."""
        return cls(observer, spec_of(observer).granularity)

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        raise SpecError(
            "an observer module cannot be named in a spec", advice="name minmax, mse, percentile or entropy"
        )

    @property
    def seen(self) -> int:
        return self.counted or int(has_seen(self.observer))

    def update(self, x: Tensor, *, where: str = "") -> None:
        with torch.no_grad():
            self.observer(x.detach())
        self.counted += x.numel()

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        if self.seen and other.seen:
            raise ObservationError(
                f"what two of {type(self.observer).__name__} have seen cannot be merged",
                advice="calibrate in one process, or with the engine's own observations",
            )
        return self if self.seen else other

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        check_spec(self, spec, where)
        refuse_empty(self, where)
        scale, zero_point = (value.detach() for value in self.observer.calculate_qparams())  # type: ignore[operator]
        shape = (-1,) if getattr(inner(self.observer), "qscheme", None) in PER_CHANNEL else ()
        shape = () if isinstance(spec.granularity, PerTensor) else shape or scale.shape
        return QParams(scale.float().reshape(shape), torch.round(zero_point).to(torch.int64).reshape(shape))

    def to_state(self) -> State:
        if not self.seen:
            return State({}, {"seen": 0})
        scale, zero_point = self.observer.calculate_qparams()  # type: ignore[operator]
        return State({"scale": scale.float(), "zero_point": zero_point.to(torch.int64)}, {"seen": self.seen})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        seen = state.count("seen")
        if not seen:
            raise LoadError("an observer that has seen nothing cannot be read from a file")
        scale = state.tensor("scale", torch.float32)
        return cls(FoundQParams(scale, state.tensor("zero_point", torch.int64, scale.shape)), share, seen)
