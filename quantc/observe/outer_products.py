"""Exact sum of the outer products of rows, in the memory of one symmetric float64 matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quantc.observe.exact_sum import (
    ABSENT,
    WIDTH,
    digits,
    exponents_in,
    exponents_of,
    integers_in,
    moved,
    place_of,
    power,
)
from quantc.spec.observation import State

PANEL = 256
"""Columns that are multiplied at a time: half of a symmetric product is saved, and temporaries are small."""
DEAD = ABSENT // 2
"""The exponent of a channel that is zero throughout."""


@dataclass(eq=False, slots=True)
class OuterProducts:
    """The sum over batches of `xᵀx`, `[groups, channels, channels]`, by the digits of `quantc.observe.exact_sum`.

    There is one exponent a channel, as |G_ij| ≤ √(G_ii G_jj) < 2^(e_i + e_j) for the products G of any batch.
    """

    exponents: Tensor
    """For each channel the smallest e such that no batch's G_ii has reached 2^(2e)."""
    packed: Tensor
    """The digits, `[groups, channels, channels + 1]`: the upper one of G_ij (i <= j) at [i, j + 1], the lower at [j, i]."""

    @classmethod
    def zeros(cls, groups: int, width: int) -> Self:
        exponents = torch.full((groups, width), DEAD, dtype=torch.int32)
        return cls(exponents, torch.zeros(groups, width, width + 1, dtype=torch.float64))

    def clone(self) -> Self:
        return type(self)(self.exponents, self.packed.clone())

    def add_integers(self, integers: Tensor, exponents: Tensor) -> None:
        """Add the outer products of `integers * 2^exponents`, rows in fixed point, in place. Overwrites `integers`."""
        unit = power(exponents)
        self._make_room(_bounds(integers.square().sum(1) * unit.square()))
        whole, rest = _split(self.exponents)
        integers.mul_((unit * power(-WIDTH * whole)).unsqueeze(1))  # by powers of two: the products stay exact
        for start, end in _panels(integers.shape[2]):
            products = torch.bmm(integers[:, :, start:end].mT, integers[:, :, start:])
            self._add_panel(start, products, rest)

    def add_matrix(self, matrix: Tensor) -> None:
        """Add a symmetric positive semidefinite matrix as one batch, in place."""
        self._make_room(_bounds(matrix.diagonal(dim1=1, dim2=2)) + 1)  # rounding may have broken the bound by a little
        whole, rest = _split(self.exponents)
        unit = power(-WIDTH * whole)
        for start, end in _panels(matrix.shape[2]):
            panel = matrix[:, start:end, start:] * unit[:, start:end, None] * unit[:, None, start:]
            self._add_panel(start, panel, rest)

    def _add_panel(self, start: int, scaled: Tensor, rest: Tensor) -> None:
        end = start + scaled.shape[1]
        is_high = (rest[:, start:end, None] + rest[:, None, start:]) > WIDTH
        scaled.mul_(torch.where(is_high, 2.0**-WIDTH, 1.0))
        self._put(start, *digits(scaled), add=True)

    def _put(self, start: int, upper: Tensor, lower: Tensor, *, add: bool) -> None:
        """Set or add the digits of the rows from `start`, of the columns from `start`."""
        width = upper.shape[1]
        end = start + width
        corner = self.packed[:, start:end, start : end + 1]
        square = torch.zeros_like(corner)
        square[:, :, 1:] = upper[:, :, :width].triu()
        square[:, :, :width] += lower[:, :, :width].mT.tril()
        right, below = self.packed[:, start:end, end + 1 :], self.packed[:, end:, start:end]
        if add:
            corner += square
            right += upper[:, :, width:]
            below += lower[:, :, width:].mT
            return
        corner.copy_(square)
        right.copy_(upper[:, :, width:])
        below.copy_(lower[:, :, width:].mT)

    def _panel(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """The digits of rows, of the columns from `start`: the inverse of `_put`, but below the diagonal."""
        upper = self.packed[:, start:end, start + 1 :]
        lower = self.packed[:, start:, start:end].mT
        return upper, lower

    def _make_room(self, exponents: Tensor) -> None:
        """Raise the exponents to at least these."""
        exponents = torch.maximum(self.exponents, exponents)
        if torch.equal(exponents, self.exponents):
            return
        for start, end in _panels(exponents.shape[1]):
            steps = _places(exponents, start, end) - _places(self.exponents, start, end)
            if bool(steps.any()):
                self._put(start, *moved(*self._panel(start, end), steps), add=False)
        self.exponents = exponents

    def merged(self, other: Self) -> Self:
        total = self.clone()
        total._make_room(other.exponents)
        if not torch.equal(total.exponents, other.exponents):
            other = other.clone()
            other._make_room(total.exponents)
        total.packed += other.packed
        return total

    def value(self) -> Tensor:
        """The sum as a symmetric matrix, rounded to float64."""
        found = torch.empty_like(self.packed[:, :, 1:])
        for start, end in _panels(self.exponents.shape[1]):
            upper, lower = self._panel(start, end)
            unit = power(WIDTH * (_places(self.exponents, start, end) - 1))
            panel = (upper + lower * 2.0**-WIDTH) * unit
            width = end - start
            panel[:, :, :width] = panel[:, :, :width].triu() + panel[:, :, :width].triu(1).mT
            found[:, start:end, start:] = panel
            found[:, end:, start:end] = panel[:, :, width:].mT
        return found

    def reordered(self, index: Tensor) -> Self:
        """The sum for channels in another order."""
        width = self.exponents.shape[1]
        upper, lower = self.packed[:, :, 1:].triu(), self.packed[:, :, :width].tril().mT
        upper, lower = (part + part.triu(1).mT for part in (upper, lower))
        total = type(self)(self.exponents[:, index], torch.empty_like(self.packed))
        for start, end in _panels(width):
            rows, columns = index[start:end, None], index[start:]
            total._put(start, upper[:, rows, columns], lower[:, rows, columns], add=False)
        return total

    def to_tensors(self) -> dict[str, Tensor]:
        return {"exponents": self.exponents, "packed": self.packed}

    @classmethod
    def from_state(cls, state: State) -> Self:
        """The inverse of `to_tensors`. LoadError, naming the tensor, on anything else."""
        exponents = exponents_in(state, "exponents")
        groups, width = exponents.shape
        return cls(exponents, integers_in(state, "packed", torch.Size((groups, width, width + 1))))


def _panels(width: int) -> Iterator[tuple[int, int]]:
    """The first column of each panel, and the one after its last."""
    return ((start, min(start + PANEL, width)) for start in range(0, width, PANEL))


def _bounds(diagonal: Tensor) -> Tensor:
    """The smallest exponents e with G_ii < 2^(2e)."""
    return (exponents_of(diagonal) + 1).div(2, rounding_mode="floor")


def _split(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents in whole places and a rest from 1 to `WIDTH`."""
    whole = (exponents - 1).div(WIDTH, rounding_mode="floor")
    return whole, exponents - WIDTH * whole


def _places(exponents: Tensor, start: int, end: int) -> Tensor:
    return place_of(exponents[:, start:end, None] + exponents[:, None, start:])
