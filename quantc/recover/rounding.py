"""Rounding of weights to a fixed grid so that the layer's output changes little.

Weights come by groups, `[groups, outputs, inputs]`. Both ways set one input's weights after the other, for all outputs at
once, in the order of the inputs' energy: the largest has no errors to take up. The work on one column is a dozen calls on
a few hundred numbers, in NumPy, where a call costs least; products with the matrix are torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantc.recover.pair_limits import Neighbours

Floats = NDArray[np.float64]

BLOCK = 32
"""Columns between two products with the whole matrix."""
SWEEPS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The numbers that weights may take: `(level - zero_point) * scale`, by weight."""

    scale: Tensor
    zero_point: Tensor
    qmin: int
    qmax: int
    neighbours: Neighbours | None = None
    """Limits on the levels of neighbours."""


class Columns:
    """Weights by column, `[groups, inputs, outputs]`, in an order of the inputs, and the levels they have so far."""

    def __init__(self, weights: Tensor, grid: Grid, order: list[int]) -> None:
        self.order, self.qmin, self.qmax = order, grid.qmin, grid.qmax
        self.weights, self.scale, self.zero = (self._by_column(x) for x in (weights, grid.scale, grid.zero_point))
        self.inverse = 1.0 / self.scale
        self.levels: Floats = np.zeros_like(self.weights)
        self.errors: Floats = np.zeros_like(self.weights)
        self.limits = None if grid.neighbours is None else grid.neighbours.ordered(order)

    def _by_column(self, x: Tensor) -> Floats:
        found: Floats = x.double().transpose(1, 2)[:, self.order].contiguous().numpy()
        return found

    def result(self) -> Tensor:
        """The levels, `[groups, outputs, inputs]`, inputs in their own order."""
        found = torch.empty(self.levels.shape, dtype=torch.float64)
        found[:, self.order] = torch.from_numpy(self.levels)
        return found.transpose(1, 2).contiguous()

    def start(self, levels: Tensor) -> None:
        """Begin at some levels."""
        self.levels = self._by_column(levels)
        self.errors = self.weights - (self.levels - self.zero) * self.scale

    def set(self, column: int, wanted: Any) -> None:
        """Give a column the nearest levels that those of the others allow."""
        level = wanted * self.inverse[:, column]
        np.rint(level, out=level)
        level += self.zero[:, column]
        low: Any = self.qmin
        high: Any = self.qmax
        if self.limits is not None:
            low, high = self.limits.bounds(self.levels, column, low, high)
        np.clip(level, low, high, out=level)
        self.levels[:, column] = level
        level -= self.zero[:, column]
        level *= self.scale[:, column]
        np.subtract(self.weights[:, column], level, out=self.errors[:, column])


def with_feedback(columns: Columns, unit: Tensor) -> None:
    """Round so that each column takes up the errors of those before it. `unit` is the upper factor of unit diagonal of the
    mean outer product (`U D Uᵀ`), in the columns' order: nothing that rounds in this order does better."""
    width = columns.weights.shape[1]
    weights, factor = torch.from_numpy(columns.weights), unit.numpy()
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = torch.from_numpy(columns.errors[:, :start])
        wanted = (weights[:, start:end] + unit[:, :start, start:end].mT @ errors).numpy()
        for column in range(start, end):
            columns.set(column, wanted[:, column - start])
            wanted[:, column - start + 1 :] += (
                factor[:, column, column + 1 : end, None] * columns.errors[:, column, None]
            )


def by_coordinate(columns: Columns, products: Tensor, sweeps: int = SWEEPS) -> None:
    """Change single levels as long as that lowers the error, for some sweeps. `products` are in the columns' order."""
    width = columns.weights.shape[1]
    matrix = products.numpy()
    diagonal = products.diagonal(dim1=1, dim2=2).numpy()
    for _ in range(sweeps):
        before = columns.levels.copy()
        for start in range(0, width, BLOCK):
            end = min(start + BLOCK, width)
            pull = (products[:, start:end] @ torch.from_numpy(columns.errors)).numpy()
            for column in range(start, end):
                old = columns.errors[:, column].copy()
                value = columns.weights[:, column] - old
                columns.set(column, value + pull[:, column - start] / diagonal[:, column, None])
                old -= columns.errors[:, column]
                if old.any():
                    pull -= matrix[:, start:end, column, None] * old[:, None]
        if np.array_equal(before, columns.levels):
            break
