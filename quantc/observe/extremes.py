"""Smallest and largest value of each channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError
from quantc.spec.observation import Order, State, no_options
from quantc.spec.spec import Option
from quantc.spec.statistic import Change, Permutation, Rotation, check_same_kind, check_widths


@dataclass(eq=False, slots=True)
class Extremes:
    """The range of each channel of a tensor: `[groups, channels]`."""

    statistics: ClassVar[str] = "extremes"
    order: ClassVar[Order] = Order.FREE

    seen: int = 0
    low: Tensor | None = None
    high: Tensor | None = None

    @classmethod
    def empty(cls, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls()

    def update(self, x: Tensor, *, batch: int = 0, where: str = "") -> None:
        if x.numel():
            x = x.detach().float()
            self._widen(type(self)(x.shape[1], x.amin(1) + 0.0, x.amax(1) + 0.0), where)

    def _widen(self, other: Extremes, where: str = "") -> None:
        self.seen += other.seen
        if other.low is None or other.high is None:
            return
        if self.low is None or self.high is None:
            self.low, self.high = other.low, other.high
            return
        check_widths(self.low.shape, other.low.shape, where)
        self.low, self.high = torch.minimum(self.low, other.low), torch.maximum(self.high, other.high)

    def merge(self, other: Self) -> Self:
        check_same_kind(self, other)
        merged = type(self)(self.seen, self.low, self.high)
        merged._widen(other)
        return merged

    def carried(self, by: Change) -> Self | None:
        """The range after a scale, up to one rounding, or in another order; None for rotations, and for permutations of
        grouped channels, which may cross groups."""
        if self.low is None or self.high is None:
            return type(self)(self.seen)
        if isinstance(by, Rotation) or (isinstance(by, Permutation) and len(self.low) > 1):
            return None
        if isinstance(by, Permutation):
            return type(self)(self.seen, self.low[:, by.index], self.high[:, by.index])
        factors = by.factors.float().expand(self.low.shape)
        ends = torch.stack([self.low * factors, self.high * factors]) + 0.0
        return type(self)(self.seen, ends.amin(0), ends.amax(0))

    def to_state(self) -> State:
        values = {"seen": self.seen}
        return State({} if self.low is None or self.high is None else {"low": self.low, "high": self.high}, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        loaded = cls(state.count("seen"))
        if not state.tensors and not loaded.seen:
            return loaded
        loaded.low = state.tensor("low", torch.float32)
        loaded.high = state.tensor("high", torch.float32, loaded.low.shape)
        if loaded.low.dim() != 2 or not bool((loaded.low <= loaded.high).all()):
            raise LoadError("the tensors 'low' and 'high' are no ranges of channels")
        return loaded
