"""Gram matrix of the channels that a layer reads: exact, whatever the order of the batches.

The squared error of a layer's output is `trace(E G Eᵀ)` for a change `E` of its weights, so that a Gram is all that
rounding weights needs to know of the data. Each batch is rounded to 15 bits of the largest value of each channel, its
products are added up in float64 without rounding, by whatever BLAS in whatever order, and batches are added up exactly
too. Memory is about 8·d² bytes a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError, ObservationError
from quantc.observe.exact_sum import MAX_ROWS, ExactSum, fixed_point, power
from quantc.observe.outer_products import OuterProducts
from quantc.spec.observation import Order, State, no_options
from quantc.spec.spec import Option
from quantc.spec.statistic import Change, Permutation, Scale, check_same_kind, check_widths


@dataclass(eq=False, slots=True)
class Gram:
    """Number of rows, their sum, and the sum of their outer products."""

    statistics: ClassVar[str] = "gram"
    order: ClassVar[Order] = Order.FREE

    seen: int = 0
    total: ExactSum | None = None
    products: OuterProducts | None = None

    @classmethod
    def empty(cls, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls()

    def update(self, x: Tensor, *, batch: int = 0, where: str = "") -> None:
        for rows in torch.split(x, MAX_ROWS, dim=1):
            if rows.numel():
                self._add(rows, where)

    def _add(self, rows: Tensor, where: str) -> None:
        groups, count, width = rows.shape
        if self.total is None or self.products is None:
            self.total, self.products = ExactSum.zeros(groups, width), OuterProducts.zeros(groups, width)
        check_widths(self.total.upper.shape, torch.Size((groups, width)), where)
        integers, exponents = fixed_point(rows)
        self.seen += count
        self.total = self.total.added(integers.sum(1) * power(exponents))
        self.products.add_integers(integers, exponents)

    def merge(self, other: Self) -> Self:
        check_same_kind(self, other)
        seen = self.seen + other.seen
        if self.total is None or self.products is None:
            return type(self)(seen, other.total, None if other.products is None else other.products.clone())
        if other.total is None or other.products is None:
            return type(self)(seen, self.total, self.products.clone())
        check_widths(self.total.upper.shape, other.total.upper.shape)
        return type(self)(seen, self.total.merged(other.total), self.products.merged(other.products))

    def matrix(self) -> Tensor:
        """The sum of the outer products, `[groups, channels, channels]`, float64. ObservationError without data."""
        if self.products is None:
            raise ObservationError("nothing was observed here", advice="calibrate with at least one batch")
        return self.products.value()

    def mean(self) -> Tensor:
        """The mean row, `[groups, channels]`, float64. ObservationError without data."""
        if self.total is None:
            raise ObservationError("nothing was observed here", advice="calibrate with at least one batch")
        return self.total.value() / self.seen

    def covariance(self) -> Tensor:
        """`matrix / seen` less the outer product of the mean."""
        mean = self.mean()
        return self.matrix() / self.seen - mean.unsqueeze(2) * mean.unsqueeze(1)

    def carried(self, by: Change) -> Self | None:
        """The Gram of the changed channels, up to one rounding; permutations are exact in bits. None for permutations
        and rotations of grouped channels, which may cross groups."""
        if self.total is None or self.products is None:
            return type(self)(self.seen)
        groups, width = self.total.upper.shape
        if isinstance(by, Scale):
            factors = by.factors.double().expand(groups, width)
            return self._anew(self.total.value() * factors, _scaled(self.matrix(), factors))
        if groups > 1:
            return None
        if isinstance(by, Permutation):
            return type(self)(self.seen, self.total.reordered(by.index), self.products.reordered(by.index))
        turn = by.matrix.double()
        return self._anew(self.total.value() @ turn, turn.mT @ self.matrix() @ turn)

    def _anew(self, total: Tensor, matrix: Tensor) -> Self:
        products = OuterProducts.zeros(*total.shape)
        products.add_matrix(matrix)
        return type(self)(self.seen, ExactSum.zeros(*total.shape).added(total), products)

    def to_state(self) -> State:
        values = {"seen": self.seen}
        if self.total is None or self.products is None:
            return State({}, values)
        return State({**self.total.to_tensors("total"), **self.products.to_tensors()}, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        loaded = cls(state.count("seen"))
        if not state.tensors:
            if loaded.seen:
                raise LoadError(f"the field 'seen' is {loaded.seen}, and there are no tensors")
            return loaded
        loaded.products = OuterProducts.from_state(state)
        loaded.total = ExactSum.from_state(state, "total", loaded.products.exponents.shape)
        return loaded


def _scaled(matrix: Tensor, factors: Tensor) -> Tensor:
    return matrix * factors.unsqueeze(2) * factors.unsqueeze(1)
