"""The range method that errs least on batches it was not fitted to, tensor by tensor.

Ranges are fitted to the even batches and judged on the odd ones, and the other way round. The error is the mean square of
what rounding and clipping do to the tensor: a consumer adds it up over its inputs, whichever range made it. A range that
clips what the other half has, as outlier channels of transformers, pays for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor

from quantc.errors import LoadError
from quantc.observe.histogram import Histogram
from quantc.observe.minmax import MinMax, WithExtremes
from quantc.observe.ranges import METHODS, squared_error
from quantc.spec.granularity import Share
from quantc.spec.numerics import QParams
from quantc.spec.observation import Order, State, check_mergeable, check_spec, no_options, refuse_empty
from quantc.spec.spec import Option, QuantSpec

TRIED = ("minmax", "mse", "percentile", "entropy")
LEAST_GAIN = 0.02
"""Share of the error that clipping must save to be preferred to the full range."""
HALVES = ("even", "odd")


@dataclass(frozen=True, slots=True)
class Chosen:
    """A range method, and the errors that decided: relative to the tensor's power, by method."""

    method: str
    errors: Mapping[str, float]

    def __str__(self) -> str:
        if not self.errors:
            return f"{self.method}: one half of the batches alone, nothing to judge on"
        others = ", ".join(f"{name} {_decibels(error)}" for name, error in self.errors.items() if name != self.method)
        return f"{self.method}: {_decibels(self.errors[self.method])} dB on other batches ({others})"


@dataclass(eq=False, slots=True)
class Auto(WithExtremes):
    """Histograms of the even and of the odd batches, and the best range method on them."""

    statistics: ClassVar[str] = "auto"
    order: ClassVar[Order] = Order.FREE

    extremes: MinMax = field(default_factory=MinMax)
    even: Histogram = field(default_factory=Histogram)
    odd: Histogram = field(default_factory=Histogram)
    batch: int = 0
    """The number of the running batch, which decides the half."""
    known: tuple[int, QuantSpec, Chosen] | None = field(default=None, repr=False)

    @classmethod
    def empty(cls, share: Share, options: Mapping[str, Option]) -> Self:
        no_options(cls.statistics, options)
        return cls(MinMax(share), Histogram(MinMax(share)), Histogram(MinMax(share)))

    def update(self, x: Tensor, *, where: str = "") -> None:
        half = self.odd if self.batch % 2 else self.even
        half.update(x, where=where)
        self.extremes = self.even.extremes.merge(self.odd.extremes)

    def merge(self, other: Self) -> Self:
        check_mergeable(self, other)
        even, odd = self.even.merge(other.even), self.odd.merge(other.odd)
        return type(self)(even.extremes.merge(odd.extremes), even, odd)

    def whole(self) -> Histogram:
        """The histogram of all batches."""
        return self.even.merge(self.odd)

    def qparams(self, spec: QuantSpec, *, where: str = "") -> QParams:
        check_spec(self, spec, where)
        refuse_empty(self, where)
        return self.whole().qparams(spec.but(observe=self.chosen(spec).method), where=where)

    def chosen(self, spec: QuantSpec) -> Chosen:
        """The method for a spec."""
        if self.known is None or self.known[:2] != (self.seen, spec):
            self.known = self.seen, spec, self._choose(spec)
        return self.known[2]

    def _choose(self, spec: QuantSpec) -> Chosen:
        if not (self.even.seen and self.odd.seen) or spec.dtype.is_float:
            return Chosen("minmax", {})
        power = sum(_power(half) for half in (self.even, self.odd)) or 1.0
        errors = {
            name: (_error(name, self.even, self.odd, spec) + _error(name, self.odd, self.even, spec)) / power
            for name in TRIED
        }
        best = min(errors, key=errors.__getitem__)
        return Chosen("minmax" if errors["minmax"] * (1 - LEAST_GAIN) <= errors[best] else best, errors)

    def to_state(self) -> State:
        states = {name: half.to_state() for name, half in zip(HALVES, (self.even, self.odd), strict=True)}
        tensors = {f"{name}.{key}": x for name, state in states.items() for key, x in state.tensors.items()}
        values: dict[str, Any] = {name: dict(state.values) for name, state in states.items()}
        return State(tensors, {**values, "seen": self.seen, "non_finite": self.non_finite})

    @classmethod
    def from_state(cls, share: Share, state: State) -> Self:
        """The inverse of `to_state`. LoadError, naming the field, on anything else."""
        even, odd = (_half(share, state, name) for name in HALVES)
        found = cls(even.extremes.merge(odd.extremes), even, odd)
        if (state.count("seen"), state.count("non_finite")) != (found.seen, found.non_finite):
            raise LoadError("the field 'seen' contradicts the halves")
        return found


def _half(share: Share, state: State, name: str) -> Histogram:
    values = state.values.get(name)
    if not isinstance(values, Mapping):
        raise LoadError(f"the field {name!r} does not hold the values of a half")
    tensors = {key.partition(".")[2]: x for key, x in state.tensors.items() if key.startswith(f"{name}.")}
    return Histogram.from_state(share, State(tensors, values))


def _error(name: str, fit: Histogram, judge: Histogram, spec: QuantSpec) -> float:
    """Squared error on one half of ranges that were fitted to the other."""
    method, total = METHODS[name](), 0.0
    for own, other in zip(fit.cells(), judge.cells(), strict=True):
        low, high = method.range(own, spec)
        total += float(squared_error(other, np.array([low]), np.array([high]), spec)[0])
    return total


def _power(half: Histogram) -> float:
    return sum(float((cells.middle**2) @ cells.mass) for cells in half.cells())


def _decibels(error: float) -> str:
    return f"{-10 * math.log10(error):.1f}" if error > 0 else "exact"
