"""A histogram over float32 bit patterns; see `quantc.observe.buckets`.

One pass over the data serves every range method and every bit width. Merging adds integers, so it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import DataError, LoadError
from quantc.observe.buckets import BUCKETS, Cells, bucket_of, cells_of, count_buckets, is_finite_bucket
from quantc.observe.minmax import MinMax, WithExtremes, as_float32
from quantc.observe.ranges import Percentile, method_of
from quantc.spec.formats import PerTensor
from quantc.spec.granularity import Share, as_rows, in_memory_order
from quantc.spec.numerics import QParams, qparams_from_range
from quantc.spec.observation import Order, State, check_mergeable, check_spec
from quantc.spec.spec import Option, QuantSpec


@dataclass(eq=False, slots=True)
class Histogram(WithExtremes):
    """Exact counts of the data by magnitude, and its exact extremes.

    `counts` has a row for each set that shares a scale and a column for each bucket in `columns`: only those that have
    been hit, since all of them would take 256 kB a row.
    """

    statistics: ClassVar[str] = "histogram"
    order: ClassVar[Order] = Order.FREE

    extremes: MinMax = field(default_factory=MinMax)
    columns: Tensor | None = None
    counts: Tensor | None = None

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        # the options belong to the range method and are used when the range is computed
        return cls(MinMax(share))

    def update(self, x: Tensor, *, where: str = "") -> None:
        if x.numel() == 0:
            return
        x = as_float32(x, where)
        self.extremes.update(x, where=where)
        if isinstance(self.share, PerTensor):
            low = self.extremes.low
            is_positive = low is not None and float(low) >= 0 and not self.extremes.non_finite
            hit, counts = count_buckets(in_memory_order(x), is_positive=is_positive)
            self._add(hit, counts.unsqueeze(0))
            return
        rows = bucket_of(as_rows(x, self.share, where=where).contiguous())
        columns = torch.nonzero(torch.bincount(rows.reshape(-1), minlength=BUCKETS)).reshape(-1)
        place = torch.zeros(BUCKETS, dtype=torch.int64)
        place[columns] = torch.arange(len(columns))
        slots = place[rows.to(torch.int64)] + torch.arange(len(rows)).unsqueeze(1) * len(columns)
        counts = torch.bincount(slots.reshape(-1), minlength=len(rows) * len(columns))
        self._add(columns, counts.reshape(len(rows), len(columns)))

    def _add(self, columns: Tensor, counts: Tensor) -> None:
        """Add counts of some buckets; the columns become the union of both."""
        if self.columns is None or self.counts is None:
            self.columns, self.counts = columns, counts.clone()
            return
        if len(self.counts) != len(counts):
            raise DataError(f"histograms of {len(self.counts)} and {len(counts)} rows cannot be added")
        places = torch.searchsorted(self.columns, columns).clamp_(max=len(self.columns) - 1)
        if torch.equal(self.columns[places], columns):
            self.counts[:, places] += counts
            return
        union = torch.unique(torch.cat([self.columns, columns]))
        total = torch.zeros(len(counts), len(union), dtype=torch.int64)
        total[:, torch.searchsorted(union, self.columns)] += self.counts
        total[:, torch.searchsorted(union, columns)] += counts
        self.columns, self.counts = union, total

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        counts = None if self.counts is None else self.counts.clone()
        merged = type(self)(self.extremes.merge(other.extremes), self.columns, counts)
        if other.columns is not None and other.counts is not None:
            merged._add(other.columns, other.counts)
        return merged

    def cells(self, *, where: str = "") -> list[Cells]:
        """The histogram of each set that shares a scale, for range methods."""
        low, high = self.extremes.range(where=where)
        if self.columns is None or self.counts is None:
            raise DataError("nothing was observed here", where=where or None)
        ends = zip(low.reshape(-1).tolist(), high.reshape(-1).tolist(), strict=True)
        return [cells_of(self.columns, row, *end) for row, end in zip(self.counts, ends, strict=True)]

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        check_spec(self, spec, where)
        low, high = self.extremes.range(where=where)
        method = method_of(spec.observe.name, dict(spec.observe.options), where=where)
        if spec.observe.name != "minmax" and method != Percentile(percentile=100):
            found = torch.tensor([method.range(cells, spec) for cells in self.cells(where=where)]).float()
            low, high = found[:, 0].reshape(low.shape), found[:, 1].reshape(high.shape)
        return qparams_from_range(low, high, spec, where=where)

    def to_state(self) -> State:
        inner = self.extremes.to_state()
        if self.columns is None or self.counts is None:
            return inner
        used = torch.nonzero(self.counts.sum(0)).reshape(-1)
        return State(
            {**inner.tensors, "columns": self.columns[used], "counts": self.counts[:, used].contiguous()}, inner.values
        )

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        loaded = cls(MinMax.from_state(share, state))
        if loaded.extremes.low is None:
            return loaded
        columns = state.tensor("columns", torch.int64)
        rows = loaded.extremes.low.numel()
        counts = state.tensor("counts", torch.int64, torch.Size((rows, columns.numel())))
        if columns.dim() != 1 or bool((columns < 0).any() or (columns >= BUCKETS).any() or (columns.diff() <= 0).any()):
            raise LoadError(f"the tensor 'columns' is not an ascending list of buckets below {BUCKETS}")
        if bool((counts < 0).any()) or int(counts.sum()) != loaded.seen:
            raise LoadError(f"the tensor 'counts' does not count the {loaded.seen} values that were seen")
        if int(counts[:, ~is_finite_bucket(columns)].sum()) != loaded.non_finite:
            raise LoadError("the tensor 'counts' contradicts the field 'non_finite'")
        loaded._add(columns, counts)
        return loaded
