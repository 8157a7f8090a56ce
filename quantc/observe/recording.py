"""Recording of the tensors themselves, for inspection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError, ObservationError
from quantc.observe.minmax import MinMax, WithExtremes, as_float32
from quantc.spec.formats import PerTensor
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.observation import Order, State, check_mergeable, no_options
from quantc.spec.spec import Option, QuantSpec


@dataclass(eq=False, slots=True)
class Recording(WithExtremes):
    """Every observed tensor; its range is their extremes. Takes as much memory as the data."""

    statistics: ClassVar[str] = "recording"
    order: ClassVar[Order] = Order.FREE

    extremes: MinMax = field(default_factory=MinMax)
    tensors: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls(MinMax(share))

    def update(self, x: Tensor, *, where: str = "") -> None:
        x = as_float32(x, where)
        self.extremes.update(x, where=where)
        self.tensors.append(x.clone())

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        return type(self)(self.extremes.merge(other.extremes), [*self.tensors, *other.tensors])

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        return self.extremes.qparams(spec, where=where)

    def to_state(self) -> State:
        return State({str(index): x for index, x in enumerate(self.tensors)}, {"records": len(self.tensors)})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        loaded = cls.empty(share, {})
        records = state.count("records")
        if records != len(state.tensors):
            raise LoadError(f"the field 'records' is {records}, and there are {len(state.tensors)} tensors")
        for index in range(records):
            loaded.update(state.tensor(str(index), torch.float32))
        return loaded


@dataclass(eq=False, slots=True)
class Nothing:
    """Counts the data and keeps nothing, for sites whose qparams come from elsewhere."""

    statistics: ClassVar[str] = "none"
    order: ClassVar[Order] = Order.FREE

    share: Share = field(default_factory=PerTensor)
    seen: int = 0
    non_finite: int = 0

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls(share)

    def update(self, x: Tensor, *, where: str = "") -> None:
        self.seen += x.numel()

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        return type(self)(self.share, self.seen + other.seen)

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        raise ObservationError(
            "this place keeps no statistics, so it has no range",
            where=where or None,
            advice="observe it with minmax or another observation, and calibrate again",
        )

    def to_state(self) -> State:
        return State({}, {"seen": self.seen})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        return cls(share, state.count("seen"))
