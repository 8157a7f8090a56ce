"""First and second moments of channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from quantc.errors import LoadError, SpecError
from quantc.observe.exact_sum import MAX_ROWS, ExactSum, fixed_point, power
from quantc.spec.observation import Order, State, no_options
from quantc.spec.spec import Option
from quantc.spec.statistic import Change, Permutation, Scale, check_same_kind, check_widths


@dataclass(eq=False, slots=True)
class Moments:
    """Number of rows, and the sums of each channel and of its square: `[groups, channels]`."""

    statistics: ClassVar[str] = "moments"
    order: ClassVar[Order] = Order.FREE

    seen: int = 0
    total: ExactSum | None = None
    squares: ExactSum | None = None

    @classmethod
    def empty(cls, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls()

    def update(self, x: Tensor, *, batch: int = 0, where: str = "") -> None:
        for rows in torch.split(x, MAX_ROWS, dim=1):
            if rows.numel():
                self._add(rows, where)

    def _add(self, rows: Tensor, where: str) -> None:
        integers, exponents = fixed_point(rows)
        unit = power(exponents)
        part = type(self)(
            rows.shape[1],
            ExactSum.zeros(*exponents.shape).added(integers.sum(1) * unit),
            ExactSum.zeros(*exponents.shape).added(integers.square_().sum(1) * unit.square()),
        )
        self._take(self._merged(part, where))

    def _take(self, other: Self) -> None:
        self.seen, self.total, self.squares = other.seen, other.total, other.squares

    def merge(self, other: Self) -> Self:
        check_same_kind(self, other)
        return self._merged(other, "")

    def _merged(self, other: Self, where: str) -> Self:
        seen = self.seen + other.seen
        if self.total is None or self.squares is None:
            return type(self)(seen, other.total, other.squares)
        if other.total is None or other.squares is None:
            return type(self)(seen, self.total, self.squares)
        check_widths(self.total.upper.shape, other.total.upper.shape, where)
        return type(self)(seen, self.total.merged(other.total), self.squares.merged(other.squares))

    def mean(self) -> Tensor:
        """The mean of each channel, `[groups, channels]`, float64; zeros without data."""
        return torch.zeros(0, 0, dtype=torch.float64) if self.total is None else self.total.value() / self.seen

    def mean_square(self) -> Tensor:
        """The mean of each channel's square, `[groups, channels]`, float64."""
        return torch.zeros(0, 0, dtype=torch.float64) if self.squares is None else self.squares.value() / self.seen

    def carried(self, by: Change) -> Self | None:
        """Scales and permutations are exact but for one rounding; a rotation mixes channels, whose products are not
        known."""
        if self.total is None or self.squares is None:
            return type(self)(self.seen)
        total, squares = self.total.value(), self.squares.value()
        shape = total.shape
        if isinstance(by, Scale):
            factors = by.factors.double().expand(shape[0], -1) if by.factors.dim() == 1 else by.factors.double()
            total, squares = total * factors, squares * factors.square()
        elif isinstance(by, Permutation) and shape[0] == 1:
            return type(self)(self.seen, self.total.reordered(by.index), self.squares.reordered(by.index))
        else:
            return None
        return type(self)(self.seen, ExactSum.zeros(*shape).added(total), ExactSum.zeros(*shape).added(squares))

    def to_state(self) -> State:
        values = {"seen": self.seen}
        if self.total is None or self.squares is None:
            return State({}, values)
        return State({**self.total.to_tensors("total"), **self.squares.to_tensors("squares")}, values)

    @classmethod
    def from_state(cls, state: State) -> Self:
        loaded = cls(state.count("seen"))
        if not state.tensors:
            if loaded.seen:
                raise LoadError(f"the field 'seen' is {loaded.seen}, and there are no tensors")
            return loaded
        loaded.total = ExactSum.from_state(state, "total")
        loaded.squares = ExactSum.from_state(state, "squares", loaded.total.upper.shape)
        return loaded


class Fisher(Moments):
    """Moments of the gradients of a layer's output channels, where the loss is that of a label drawn from the model's own
    output: the mean square is the diagonal of the Fisher information."""

    __slots__ = ()

    statistics: ClassVar[str] = "fisher"

    @classmethod
    def empty(cls, options: Mapping[str, Option]) -> Self:
        """The option `axis` is that of the classes in the model's output, for who computes the gradients."""
        rest = dict(options)
        if type(axis := rest.pop("axis", -1)) is not int:
            raise SpecError(f"axis: it must be a whole number (given: {axis!r})")
        no_options(cls.statistics, rest)
        return cls()
