"""Scales fitted to the weights themselves, rather than to their range."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError, ObservationError
from quantc.observe.fit_search import best_qparams
from quantc.observe.minmax import MinMax, WithExtremes, as_float32
from quantc.spec.granularity import Share, as_rows
from quantc.spec.numerics import QParams, qparams_from_range
from quantc.spec.observation import Order, State, check_mergeable, check_spec, no_options
from quantc.spec.spec import Option, QuantSpec


@dataclass(eq=False, slots=True)
class Fit(WithExtremes):
    """Qparams of least squared error on the observed numbers, for each set that shares a scale.

    It keeps every number, so it is for weights only; specs of other roles refuse it. Min-max is among the candidates:
    no set has a larger error than with it.
    """

    statistics: ClassVar[str] = "fit"
    order: ClassVar[Order] = Order.FREE

    extremes: MinMax = field(default_factory=MinMax)
    rows: Tensor | None = None
    """The numbers, a row for each set. Those of several tensors are sorted, so that the result is independent of their
    order."""

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls(MinMax(share))

    def update(self, x: Tensor, *, where: str = "") -> None:
        if x.numel() == 0:
            return
        x = as_float32(x, where)
        self.extremes.update(x, where=where)
        # adding 0.0 maps -0.0 to 0.0, and copies: later changes of the weight have no effect
        self._add(as_rows(x, self.share) + 0.0)

    def _add(self, rows: Tensor) -> None:
        self.rows = rows if self.rows is None else torch.cat([self.rows, rows], 1).sort(1).values

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        merged = type(self)(self.extremes.merge(other.extremes), self.rows)
        if other.rows is not None:
            merged._add(other.rows)
        return merged

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        check_spec(self, spec, where)
        low, high = self.extremes.range(where=where)
        if self.rows is None:
            raise ObservationError("nothing was observed here", where=where or None, advice="give it the weights first")
        start = qparams_from_range(low.reshape(-1), high.reshape(-1), spec, where=where)
        found = best_qparams(self.rows, start, spec)
        return QParams(found.scale.reshape(low.shape), found.zero_point.reshape(low.shape))

    def to_state(self) -> State:
        inner = self.extremes.to_state()
        return inner if self.rows is None else State({**inner.tensors, "rows": self.rows}, inner.values)

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        loaded = cls(MinMax.from_state(share, state))
        ends = loaded.extremes.low, loaded.extremes.high
        if ends[0] is None or ends[1] is None:
            return loaded
        rows = state.tensor("rows", torch.float32)
        if rows.dim() != 2 or rows.shape[0] != ends[0].numel() or rows.numel() != loaded.seen:
            raise LoadError(
                f"the tensor 'rows' is {list(rows.shape)}, and does not hold the {loaded.seen} numbers seen"
            )
        finite = torch.isfinite(rows)
        if int((~finite).sum()) != loaded.non_finite:
            raise LoadError("the tensor 'rows' contradicts the field 'non_finite'")
        low, high = rows.where(finite, torch.inf).amin(1), rows.where(finite, -torch.inf).amax(1)
        if not (torch.equal(low, ends[0].reshape(-1)) and torch.equal(high, ends[1].reshape(-1))):
            raise LoadError("the tensor 'rows' contradicts the tensors 'low' and 'high'")
        loaded._add(rows)
        return loaded
