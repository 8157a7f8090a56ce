"""The values the oracle computes with: exact sums of integers, and how they are rounded, in NumPy's float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from quantc.ir.program import Program
from quantc.spec.arithmetic import EXACT, Arithmetic
from tests.support.integer_oracle_sums import Ints, Reals


@dataclass(frozen=True, eq=False)
class Steps:
    """What a quantize or dequantize op says: scales as float64, zero points, the range."""

    scale: Reals
    zero_point: Ints
    axis: int | None
    qmin: int
    qmax: int
    dtype: torch.dtype

    @staticmethod
    def of(program: Program, node: fx.Node) -> Steps:
        """Read the arguments of `quantized_decomposed.(de)quantize_per_tensor` or `_per_channel`."""
        values: list[Any] = [program.tensor(arg) if isinstance(arg, fx.Node) else arg for arg in node.args[1:]]
        scale, zero_point, *rest = values
        axis = rest.pop(0) if "per_channel" in str(node.target) else None
        scales = np.asarray(scale, dtype=np.float32).astype(np.float64)
        zeros = np.zeros(scales.shape) if zero_point is None else np.asarray(zero_point)
        return Steps(scales, zeros.astype(np.int64), axis, rest[0], rest[1], rest[2])

    def along(self, values: Reals | Ints, rank: int) -> Any:
        """Scales or zero points shaped to go with a tensor of `rank` axes."""
        if self.axis is None:
            return values
        return values.reshape([-1 if axis == self.axis % rank else 1 for axis in range(rank)])


ROUND: dict[str, Callable[[Reals], Reals]] = {
    "half-even": np.rint,
    "half-up": lambda x: np.floor(x) + (x - np.floor(x) >= 0.5),
    "half-away": lambda x: np.trunc(x) + np.sign(x) * (np.abs(x - np.trunc(x)) >= 0.5),
    "truncate": np.trunc,
    "floor": np.floor,
}
"""By the name an arithmetic has for it."""


class Exact(ABC):
    """A real number for each element, known before anything is rounded."""

    @abstractmethod
    def levels(self, scale: Reals) -> Reals:
        """The numbers counted in steps of `scale`, in float64."""

    @abstractmethod
    def reals(self) -> Reals:
        """The numbers themselves, in float64."""

    def onto(self, steps: Steps, arithmetic: Arithmetic = EXACT) -> Tensor:
        """One rounding onto the grid of a result, as a target does it."""
        levels = np.clip(self.places(steps, arithmetic), steps.qmin, steps.qmax)
        return torch.from_numpy(np.asarray(levels)).to(steps.dtype)

    def places(self, steps: Steps, arithmetic: Arithmetic) -> Reals:
        """Rounded levels; of a target that does not saturate, within the bits of the result."""
        levels = ROUND[arithmetic.rounding](self.levels(steps.scale)) + steps.zero_point
        if arithmetic.saturate:
            return levels
        kind = torch.iinfo(steps.dtype)
        return kind.min + np.mod(levels - kind.min, kind.max - kind.min + 1.0)

    def single(self) -> Tensor:
        """One rounding to float32."""
        return torch.from_numpy(np.asarray(self.reals()).astype(np.float32))


@dataclass(frozen=True, eq=False)
class Terms(Exact):
    """A sum of integers, each times a scale: `Σ n·s`. The terms are added from left to right."""

    parts: tuple[tuple[Ints, Reals], ...]

    def levels(self, scale: Reals) -> Reals:
        return _added([ints * (own / scale) for ints, own in self.parts])

    def reals(self) -> Reals:
        return _added([ints * own for ints, own in self.parts])

    def scaled(self, factor: float) -> Terms:
        """Every integer times a whole number."""
        return Terms(tuple((ints * int(factor), own) for ints, own in self.parts))


def _added(terms: Sequence[Any]) -> Reals:
    total = np.asarray(terms[0], dtype=np.float64)
    for term in terms[1:]:
        total = total + term
    return total


@dataclass(frozen=True, eq=False)
class Average(Exact):
    """A sum of integers by how many count: `n·s / count`."""

    total: Ints
    scale: Reals
    count: Any

    def levels(self, scale: Reals) -> Reals:
        return np.asarray(self.total * (self.scale / (scale * self.count)))

    def reals(self) -> Reals:
        return np.asarray(self.total * (self.scale / self.count))


@dataclass(frozen=True, eq=False)
class Clamped(Exact):
    """Numbers kept between two others; where these cross, the upper one wins."""

    inner: Exact
    low: float
    high: float

    def levels(self, scale: Reals) -> Reals:
        with np.errstate(invalid="ignore"):
            return np.minimum(np.maximum(self.inner.levels(scale), self.low / scale), self.high / scale)

    def reals(self) -> Reals:
        return np.minimum(np.maximum(self.inner.reals(), self.low), self.high)

    def places(self, steps: Steps, arithmetic: Arithmetic) -> Reals:
        """The bounds are constants, which are rounded half to even, and compared with what is rounded."""
        low, high = (np.rint(bound / steps.scale) + steps.zero_point for bound in (self.low, self.high))
        return np.minimum(np.maximum(self.inner.places(steps, arithmetic), low), high)


@dataclass(frozen=True, eq=False)
class Function(Exact):
    """What a function of real numbers yields: a table, whose entries are rounded half to even."""

    values: Reals

    def levels(self, scale: Reals) -> Reals:
        return self.values / scale

    def places(self, steps: Steps, arithmetic: Arithmetic) -> Reals:
        return super().places(steps, EXACT)

    def reals(self) -> Reals:
        return self.values


@dataclass(frozen=True, eq=False)
class Scaled(Exact):
    """Integers times a number, plus another, for each channel."""

    values: Reals

    def levels(self, scale: Reals) -> Reals:
        return self.values / scale

    def reals(self) -> Reals:
        return self.values


@dataclass(frozen=True, eq=False)
class Joined(Exact):
    """Tensors on grids of their own, joined along an axis."""

    parts: tuple[Exact, ...]
    axis: int

    def levels(self, scale: Reals) -> Reals:
        return np.concatenate([part.levels(scale) for part in self.parts], axis=self.axis)

    def reals(self) -> Reals:
        return np.concatenate([part.reals() for part in self.parts], axis=self.axis)

    def places(self, steps: Steps, arithmetic: Arithmetic) -> Reals:
        return np.concatenate([part.places(steps, arithmetic) for part in self.parts], axis=self.axis)


class NotExactError(Exception):
    """The oracle has no exact value for this: what stands there is computed in float32."""
