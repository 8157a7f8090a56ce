"""Exact sum of the outer products of rows, in about the memory of one float64 matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from quantc.observe.exact_sum import (
    ABSENT,
    WIDTH,
    exponents_in,
    exponents_of,
    integers_in,
    moved,
    place_of,
    power,
)
from quantc.spec.observation import State

PANEL = 128
"""Rows of the matrix that are kept together: the columns before their first are left out, as it is symmetric."""
DEAD = ABSENT // 2
"""The exponent of a channel that is zero throughout."""


def cells(width: int) -> int:
    """The number of elements kept of a symmetric matrix: half of them, and the rest of the blocks on the diagonal."""
    return sum((end - start) * (width - start) for start, end in _panels(width))


@dataclass(eq=False, slots=True)
class OuterProducts:
    """The sum over batches of `xᵀx`, `[groups, channels, channels]`, by the digits of `quantc.observe.exact_sum`.

    There is one exponent a channel, as |G_ij| ≤ √(G_ii G_jj) < 2^(e_i + e_j) / 2 for the products G of any batch.
    """

    exponents: Tensor
    """For each channel the smallest e such that no batch's G_ii has reached 2^(2e) / 2."""
    upper: Tensor
    """The digits of the panels, one after the other: `[groups, cells]`."""
    lower: Tensor

    @classmethod
    def zeros(cls, groups: int, width: int) -> Self:
        empty = torch.zeros(groups, cells(width), dtype=torch.float64)
        return cls(torch.full((groups, width), DEAD, dtype=torch.int32), empty, torch.zeros_like(empty))

    def clone(self) -> Self:
        return type(self)(self.exponents, self.upper.clone(), self.lower.clone())

    def add_integers(self, integers: Tensor, exponents: Tensor) -> None:
        """Add the outer products of `integers * 2^exponents`, rows in fixed point, in place. Overwrites `integers`."""
        unit = power(exponents)
        self._make_room(_bounds(integers.square().sum(1) * unit.square()))
        whole, rest = _split(self.exponents)
        integers.mul_((unit * power(-WIDTH * whole)).unsqueeze(1))  # by powers of two: the products stay exact
        groups, _, width = integers.shape
        memory = [torch.empty(groups * min(PANEL, width) * width, dtype=torch.float64) for _ in range(2)]
        for start, end, upper, lower in self._each():
            products, digit = (_shaped(buffer, upper) for buffer in memory)
            torch.bmm(integers[:, :, start:end].mT, integers[:, :, start:], out=products)
            _add_digits(products, digit, rest, start, upper, lower)

    def add_matrix(self, matrix: Tensor) -> None:
        """Add a symmetric positive semidefinite matrix as one batch, in place."""
        self._make_room(_bounds(matrix.diagonal(dim1=1, dim2=2)) + 1)  # rounding may have broken the bound by a little
        whole, rest = _split(self.exponents)
        unit = power(-WIDTH * whole)
        for start, end, upper, lower in self._each():
            panel = matrix[:, start:end, start:] * unit[:, start:end, None] * unit[:, None, start:]
            _add_digits(panel, torch.empty_like(panel), rest, start, upper, lower)

    def _each(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """The panels: first row, the one after the last, and views of the digits."""
        groups, width = self.exponents.shape
        at = 0
        for start, end in _panels(width):
            size = (end - start) * (width - start)
            shape = (groups, end - start, width - start)
            upper, lower = (part[:, at : at + size].view(shape) for part in (self.upper, self.lower))
            yield start, end, upper, lower
            at += size

    def _make_room(self, exponents: Tensor) -> None:
        """Raise the exponents to at least these."""
        exponents = torch.maximum(self.exponents, exponents)
        if torch.equal(exponents, self.exponents):
            return
        if bool((self.exponents > DEAD).any()):  # else there are no digits yet
            for start, end, upper, lower in self._each():
                steps = self._steps(exponents, start, end)
                if steps is None:
                    continue
                for part, digits in zip((upper, lower), moved(upper, lower, steps), strict=True):
                    part.copy_(digits)
        self.exponents = exponents

    def _steps(self, exponents: Tensor, start: int, end: int) -> Tensor | None:
        """Number of bits by which the entries of a panel rise; None if none does, mostly known from the extremes alone."""
        (old_whole, old_rest), (whole, rest) = _split(self.exponents), _split(exponents)
        risen = (whole - old_whole).to(torch.int8)
        is_same = not bool(risen.any())
        if is_same and int(rest[:, start:end].max()) + int(rest[:, start:].max()) <= WIDTH:
            return None
        if is_same and int(old_rest[:, start:end].min()) + int(old_rest[:, start:].min()) > WIDTH:
            return None
        was, now = (each[:, start:end, None] > WIDTH - each[:, None, start:] for each in (old_rest, rest))
        if is_same and torch.equal(was, now):
            return None
        return risen[:, start:end, None] + risen[:, None, start:] + now.to(torch.int8) - was.to(torch.int8)

    def merged(self, other: Self) -> Self:
        total = self.clone()
        total._make_room(other.exponents)
        if not torch.equal(total.exponents, other.exponents):
            other = other.clone()
            other._make_room(total.exponents)
        total.upper += other.upper
        total.lower += other.lower
        return total

    def value(self) -> Tensor:
        """The sum as a symmetric matrix, rounded to float64."""
        groups, width = self.exponents.shape
        found = torch.empty(groups, width, width, dtype=torch.float64)
        for start, end, upper, lower in self._each():
            unit = power(WIDTH * (_places(self.exponents, start, end) - 1))
            panel = (upper + lower * 2.0**-WIDTH) * unit
            found[:, start:end, start:] = panel
            found[:, end:, start:end] = panel[:, :, end - start :].mT
        return found

    def reordered(self, index: Tensor) -> Self:
        """The sum for channels in another order."""
        groups, width = self.exponents.shape
        total = self.zeros(groups, width)
        total.exponents = self.exponents[:, index]
        for name in ("upper", "lower"):
            whole = torch.empty(groups, width, width, dtype=torch.float64)
            for start, end, *parts in self._each():
                panel = parts[name == "lower"]
                whole[:, start:end, start:] = panel
                whole[:, end:, start:end] = panel[:, :, end - start :].mT
            for start, end, *parts in total._each():
                parts[name == "lower"].copy_(whole[:, index[start:end, None], index[start:]])
        return total

    def to_tensors(self) -> dict[str, Tensor]:
        return {"exponents": self.exponents, "upper": self.upper, "lower": self.lower}

    @classmethod
    def from_state(cls, state: State) -> Self:
        """The inverse of `to_tensors`. LoadError, naming the tensor, on anything else."""
        exponents = exponents_in(state, "exponents")
        shape = torch.Size((exponents.shape[0], cells(exponents.shape[1])))
        return cls(exponents, integers_in(state, "upper", shape), integers_in(state, "lower", shape))


def _add_digits(scaled: Tensor, digit: Tensor, rest: Tensor, start: int, upper: Tensor, lower: Tensor) -> None:
    """Cut products into digits and add them. Overwrites `scaled` and `digit`."""
    rows, columns = rest[:, start : start + scaled.shape[1], None], rest[:, None, start:]
    if int(rows.min()) + int(columns.min()) > WIDTH:
        scaled.mul_(2.0**-WIDTH)
    elif int(rows.max()) + int(columns.max()) > WIDTH:
        scaled.mul_(torch.where(rows + columns > WIDTH, 2.0**-WIDTH, 1.0))
    upper += torch.round(scaled, out=digit)
    lower += scaled.sub_(digit).mul_(2.0**WIDTH).round_()


def _shaped(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer[: like.numel()].view(like.shape)


def _panels(width: int) -> Iterator[tuple[int, int]]:
    """The first column of each panel, and the one after its last."""
    return ((start, min(start + PANEL, width)) for start in range(0, width, PANEL))


def _bounds(diagonal: Tensor) -> Tensor:
    """The smallest exponents e with G_ii < 2^(2e) / 2."""
    return (exponents_of(diagonal) + 2).div(2, rounding_mode="floor")


def _split(exponents: Tensor) -> tuple[Tensor, Tensor]:
    """Exponents in whole places and a rest from 1 to `WIDTH`."""
    whole = (exponents - 1).div(WIDTH, rounding_mode="floor")
    return whole, exponents - WIDTH * whole


def _places(exponents: Tensor, start: int, end: int) -> Tensor:
    return place_of(exponents[:, start:end, None] + exponents[:, None, start:])
