"""Minimum and maximum of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import DataError, LoadError
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.granularity import Share, extremes
from quantc.spec.numerics import QParams, qparams_from_range
from quantc.spec.observation import (
    Order,
    State,
    check_mergeable,
    check_spec,
    no_options,
    refuse_empty,
)
from quantc.spec.spec import Option, QuantSpec
from quantc.spec.statistic import Change, Permutation, Rotation


def as_float32(x: Tensor, where: str) -> Tensor:
    """A floating-point tensor as float32, detached."""
    if not x.is_floating_point():
        raise DataError(
            f"a tensor of {x.dtype} was to be observed, and only floating-point ones can be",
            where=where or None,
            advice="leave this tensor as it is",
        )
    return x.detach() if x.dtype == torch.float32 else x.detach().float()


def _is_finite(low: Tensor, high: Tensor) -> bool:
    if low.dim() == 0:
        return math.isfinite(low.item()) and math.isfinite(high.item())  # four times as fast as torch.isfinite
    return bool(torch.isfinite(high - low).all())


@dataclass(eq=False, slots=True)
class MinMax:
    """The exact range of the data, for each set that shares a scale."""

    statistics: ClassVar[str] = "minmax"
    order: ClassVar[Order] = Order.FREE

    share: Share = field(default_factory=PerTensor)
    low: Tensor | None = None
    high: Tensor | None = None
    seen: int = 0
    non_finite: int = 0

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls(share)

    def update(self, x: Tensor, *, where: str = "") -> None:
        if x.numel() == 0:
            return
        x = as_float32(x, where)
        low, high = extremes(x, self.share, where=where)
        self.seen += x.numel()
        # NaN and infinity show in the width, so finite data is read only once
        if not _is_finite(low, high):
            finite = torch.isfinite(x)
            self.non_finite += int((~finite).sum())
            low, _ = extremes(x.where(finite, torch.inf), self.share)
            _, high = extremes(x.where(finite, -torch.inf), self.share)
        self._widen(low, high, where)

    def _widen(self, low: Tensor, high: Tensor, where: str) -> None:
        # adding 0.0 maps -0.0 to 0.0, so that the result is independent of the order of the data
        low, high = low + 0.0, high + 0.0
        if self.low is None or self.high is None:
            self.low, self.high = low, high
            return
        if self.low.shape != low.shape:
            raise DataError(
                f"ranges of shape {list(self.low.shape)} were collected {self.share}, and now there are {list(low.shape)}",
                where=where or None,
                advice="use per-tensor ranges where shapes change from batch to batch",
            )
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        merged = type(self)(self.share, self.low, self.high, self.seen + other.seen, self.non_finite + other.non_finite)
        if other.low is not None and other.high is not None:
            merged._widen(other.low, other.high, "")
        return merged

    def range(self, *, where: str = "") -> tuple[Tensor, Tensor]:
        """The observed range. Raises if there is no data, or if there was NaN."""
        refuse_empty(self, where)
        if self.low is None or self.high is None:
            raise DataError("nothing was observed here", where=where or None)
        return self.low, self.high

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        check_spec(self, spec, where)
        return qparams_from_range(*self.range(where=where), spec, where=where)

    def carried(self, by: Change) -> Self | None:
        """The extremes of each channel after a scale, or in another order; None where channels share a range or mix."""
        if self.low is None or self.high is None:
            return type(self)(self.share, seen=self.seen, non_finite=self.non_finite)
        if not isinstance(self.share, PerChannel) or isinstance(by, Rotation):
            return None
        if isinstance(by, Permutation):
            low, high = self.low[by.index], self.high[by.index]
        else:
            ends = torch.stack([self.low * by.factors, self.high * by.factors]) + 0.0
            low, high = ends.amin(0), ends.amax(0)
        return type(self)(self.share, low, high, self.seen, self.non_finite)

    def to_state(self) -> State:
        values = {"seen": self.seen, "non_finite": self.non_finite}
        if self.low is None or self.high is None:
            return State({}, values)
        return State({"low": self.low, "high": self.high}, values)

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        loaded = cls(share, seen=state.count("seen"), non_finite=state.count("non_finite"))
        if not loaded.seen:
            return loaded
        loaded.low = state.tensor("low", torch.float32)
        loaded.high = state.tensor("high", torch.float32, loaded.low.shape)
        if bool((torch.isnan(loaded.low) | torch.isnan(loaded.high)).any()):
            raise LoadError("the tensor 'low' or 'high' contains NaN")
        return loaded


class WithExtremes:
    """Mixin of observations that keep the extremes besides their own statistics."""

    __slots__ = ()

    extremes: MinMax

    @property
    def share(self) -> Share:
        return self.extremes.share

    @property
    def seen(self) -> int:
        return self.extremes.seen

    @property
    def non_finite(self) -> int:
        return self.extremes.non_finite
