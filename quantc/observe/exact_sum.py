"""Exact sums of floating-point numbers in a few bits, whatever the order: digits on one absolute grid.

Sums that are rounded as they grow depend on their order. Here each addend is cut into digits of `WIDTH` bits at absolute
places (multiples of 2^WIDTH), and a sum keeps the digits at two places: the lowest one that is above all addends so far
decides which. Digits are integers, so adding them is exact; those of a larger addend push the lower place out whole, for
addends before and after it alike. So a state is a function of the set of addends, and merging is associative and
commutative in bits. What is lost is less than 2^-23 of the largest addend, for each.

Digits are rounded to nearest; as addends are below half a unit of the place above theirs, they have no digit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quantc.errors import LoadError
from quantc.spec.observation import State

WIDTH = 26
"""Bits of a digit. Float64 holds the sum of 2^27 of them exactly."""
BITS = 15
"""Bits of a value in fixed point. Products of two have 30, so that float64 adds up 2^22 of them exactly, in any order."""
MAX_ROWS = 2**22
ABSENT = -320
"""The exponent of a zero: below that of any product of two float32 numbers."""


def power(exponents: Tensor) -> Tensor:
    """Two to the power of integers from -1022 to 1023, exactly."""
    return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)


def exponents_of(values: Tensor) -> Tensor:
    """The smallest exponents with |value| < 2^exponent, `ABSENT` for zeros."""
    exponents = torch.frexp(values).exponent
    return torch.where(values == 0, torch.full_like(exponents, ABSENT), exponents)


def fixed_point(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 rows `[groups, rows, channels]` as integers of `BITS` bits in float64, and the exponent of each channel:
    `rows` are about `integers * 2^exponents`."""
    exponents = exponents_of(rows.abs().amax(dim=1))
    exponents = torch.where(exponents == ABSENT, 0, exponents) - BITS
    return rows.double().mul_(power(-exponents).unsqueeze(1)).round_(), exponents


def digits(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The two digits of numbers in units of the upper one; `scaled` is overwritten."""
    upper = scaled.round()
    return upper, scaled.sub_(upper).mul_(2.0**WIDTH).round_()


def place_of(exponents: Tensor) -> Tensor:
    """The place above all numbers of these exponents."""
    return -((-exponents).div(WIDTH, rounding_mode="floor"))


def moved(upper: Tensor, lower: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """Digits of sums whose place has risen by some steps."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.where(steps == 0, upper, zero), torch.where(steps == 0, lower, torch.where(steps == 1, upper, zero))


@dataclass(eq=False, slots=True)
class ExactSum:
    """Sum of float64 tensors of one shape, whose addends are exact. A place is kept for each element."""

    exponents: Tensor
    """The smallest exponents that no addend has reached half of."""
    upper: Tensor
    lower: Tensor

    @classmethod
    def zeros(cls, *shape: int) -> Self:
        empty = torch.zeros(shape, dtype=torch.float64)
        return cls(torch.full(shape, ABSENT, dtype=torch.int32), empty, empty.clone())

    def added(self, addend: Tensor) -> Self:
        exponents = exponents_of(addend) + 1
        upper, lower = digits(addend * power(-WIDTH * (place_of(exponents) - 1)))
        return self.merged(type(self)(exponents, upper, lower))

    def merged(self, other: Self) -> Self:
        exponents = torch.maximum(self.exponents, other.exponents)
        upper, lower = self._at(exponents)
        more_upper, more_lower = other._at(exponents)
        return type(self)(exponents, upper + more_upper, lower + more_lower)

    def _at(self, exponents: Tensor) -> tuple[Tensor, Tensor]:
        return moved(self.upper, self.lower, place_of(exponents) - place_of(self.exponents))

    def value(self) -> Tensor:
        """The sum, rounded to float64."""
        return (self.upper + self.lower * 2.0**-WIDTH) * power(WIDTH * (place_of(self.exponents) - 1))

    def reordered(self, index: Tensor) -> Self:
        """The sum for channels in another order."""
        return type(self)(self.exponents[:, index], self.upper[:, index], self.lower[:, index])

    def to_tensors(self, name: str) -> dict[str, Tensor]:
        """The state, under names that begin with this one."""
        return {f"{name}.exponents": self.exponents, f"{name}.upper": self.upper, f"{name}.lower": self.lower}

    @classmethod
    def from_state(cls, state: State, name: str, shape: torch.Size | None = None) -> Self:
        """The inverse of `to_tensors`. LoadError, naming the tensor, on anything else."""
        exponents = exponents_in(state, f"{name}.exponents", shape)
        return cls(exponents, *(integers_in(state, f"{name}.{part}", exponents.shape) for part in ("upper", "lower")))


def exponents_in(state: State, name: str, shape: torch.Size | None = None) -> Tensor:
    """Exponents by name; LoadError unless they are those of products of float32 numbers."""
    found = state.tensor(name, torch.int32, shape)
    if found.dim() != 2 or bool((found < ABSENT).any() or (found > -ABSENT).any()):
        raise LoadError(f"the tensor {name!r} does not hold exponents of groups of channels")
    return found


def integers_in(state: State, name: str, shape: torch.Size) -> Tensor:
    """Sums of digits by name; LoadError unless they are integers."""
    found = state.tensor(name, torch.float64, shape)
    if not bool((found == found.trunc()).all()):  # false for NaN too
        raise LoadError(f"the tensor {name!r} does not hold integers")
    return found
