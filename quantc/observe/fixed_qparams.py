"""Qparams known beforehand, independent of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.spec.formats import PerTensor
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.observation import Order, State, check_mergeable
from quantc.spec.spec import Option, QuantSpec

HELP = "write it as fixed{scale=0.00390625 zero_point=0}"


@dataclass(eq=False, slots=True)
class FixedQParams:
    """A fixed scale and zero point, as for the output of a sigmoid. Counts the data and otherwise ignores it."""

    statistics: ClassVar[str] = "fixed"
    order: ClassVar[Order] = Order.FREE

    scale: float
    zero_point: int = 0
    share: Share = field(default_factory=PerTensor)
    seen: int = 0
    non_finite: int = 0

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        rest = dict(options)
        scale, zero_point = rest.pop("scale", None), rest.pop("zero_point", 0)
        if rest:
            raise SpecError(f"the observation fixed has no option {next(iter(rest))!r}", advice=HELP)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < float("inf"):
            raise SpecError(f"scale: it must be a positive finite number (given: {scale!r})", advice=HELP)
        if type(zero_point) is not int:
            raise SpecError(f"zero_point: it must be a whole number (given: {zero_point!r})", advice=HELP)
        return cls(float(scale), zero_point, share)

    def update(self, x: Tensor, *, where: str = "") -> None:
        self.seen += x.numel()

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        if (self.scale, self.zero_point) != (other.scale, other.zero_point):
            raise ObservationError(
                f"scale {self.scale}, zero point {self.zero_point} cannot be merged with {other.scale}, {other.zero_point}",
                advice="merge statistics that were collected with the same spec",
            )
        return type(self)(self.scale, self.zero_point, self.share, self.seen + other.seen)

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        if not isinstance(spec.granularity, PerTensor):
            raise ObservationError(f"fixed qparams are per-tensor, not {spec.granularity}", where=where or None)
        if not spec.qmin <= self.zero_point <= spec.qmax:
            raise DataError(
                f"the fixed zero point {self.zero_point} is outside {spec.qmin}..{spec.qmax}",
                where=where or None,
                advice="fix another one, or widen the spec's range",
            )
        return QParams(torch.tensor(self.scale, dtype=torch.float32), torch.tensor(self.zero_point))

    def to_state(self) -> State:
        return State({}, {"scale": self.scale, "zero_point": self.zero_point, "seen": self.seen})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        options = {"scale": state.number("scale"), "zero_point": state.values.get("zero_point", "missing")}
        try:
            loaded = cls.empty(share, options)
        except SpecError as error:
            raise LoadError(f"the field {error.what}") from error
        loaded.seen = state.count("seen")
        return loaded
