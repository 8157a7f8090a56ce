"""Moving average of per-batch ranges: it forgets, so the order of the batches matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError, ObservationError, SpecError
from quantc.observe.minmax import MinMax
from quantc.spec.formats import PerTensor
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams, qparams_from_range
from quantc.spec.observation import Order, State, check_mergeable, check_spec, refuse_empty
from quantc.spec.spec import Option, QuantSpec

DEFAULT_RATE = 0.01


@dataclass(eq=False, slots=True)
class MovingAverage:
    """Exponential moving average of ranges: each batch moves them by `rate` of the way to its own.

    Two averages that have both seen data cannot be merged: the result would depend on the order.
    """

    statistics: ClassVar[str] = "moving-average"
    order: ClassVar[Order] = Order.MATTERS

    share: Share = field(default_factory=PerTensor)
    rate: float = DEFAULT_RATE
    low: Tensor | None = None
    high: Tensor | None = None
    seen: int = 0
    non_finite: int = 0

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        rest = dict(options)
        rate = rest.pop("rate", DEFAULT_RATE)
        if rest:
            raise SpecError(f"the observation moving-average has no option {next(iter(rest))!r}", advice="it has: rate")
        if isinstance(rate, bool | str) or not 0 < rate <= 1:
            raise SpecError(f"rate: it must be a number above 0 and at most 1 (given: {rate!r})")
        return cls(share, float(rate))

    def update(self, x: Tensor, *, where: str = "") -> None:
        batch = MinMax(self.share)
        batch.update(x, where=where)
        self.seen += batch.seen
        self.non_finite += batch.non_finite
        if batch.low is None or batch.high is None or batch.non_finite:
            return
        if self.low is None or self.high is None:
            self.low, self.high = batch.low, batch.high
            return
        if self.low.shape != batch.low.shape:
            raise ObservationError(
                f"ranges of shape {list(self.low.shape)} cannot move to {list(batch.low.shape)}",
                where=where or None,
                advice="use per-tensor ranges where shapes change from batch to batch",
            )
        self.low = self.low + self.rate * (batch.low - self.low)
        self.high = self.high + self.rate * (batch.high - self.high)

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        if self.seen and other.seen:
            raise ObservationError(
                "moving averages depend on the order of the data and cannot be merged",
                advice="calibrate in one process, or observe with minmax, percentile, mse or entropy",
            )
        source = self if self.seen else other
        return type(self)(self.share, source.rate, source.low, source.high, source.seen, source.non_finite)

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        check_spec(self, spec, where)
        refuse_empty(self, where)
        if self.low is None or self.high is None:
            raise ObservationError("nothing was observed here", where=where or None, advice="calibrate first")
        return qparams_from_range(self.low, self.high, spec, where=where)

    def to_state(self) -> State:
        values = {"seen": self.seen, "non_finite": self.non_finite, "rate": self.rate}
        if self.low is None or self.high is None:
            return State({}, values)
        return State({"low": self.low, "high": self.high}, values)

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        rate = state.number("rate")
        if not 0 < rate <= 1:
            raise LoadError(f"the field 'rate' is {rate}, not above 0 and at most 1")
        loaded = cls(share, rate, seen=state.count("seen"), non_finite=state.count("non_finite"))
        if loaded.seen > loaded.non_finite and state.tensors:
            loaded.low = state.tensor("low", torch.float32)
            loaded.high = state.tensor("high", torch.float32, loaded.low.shape)
        return loaded
