"""Rounding of weights to a fixed grid so that the layer's output changes little.

Weights come by groups, `[groups, outputs, inputs]`. Both ways set one column after the other, for all outputs at once, in
the order of their energy: the largest has no errors to take up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.recover.pair_limits import Neighbours

BLOCK = 128
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

    def values(self, levels: Tensor) -> Tensor:
        """The numbers at some levels."""
        return (levels - self.zero_point) * self.scale

    def level(self, wanted: Tensor, levels: Tensor, column: int) -> Tensor:
        """The nearest level of a column that the levels of the others allow."""
        low: Tensor | int = self.qmin
        high: Tensor | int = self.qmax
        if self.neighbours is not None:
            low, high = self.neighbours.bounds(levels, column, self.qmin, self.qmax)
        found = torch.round(wanted / self.scale[..., column]) + self.zero_point[..., column]
        return found.clamp(low, high)  # type: ignore[arg-type]  # both numbers, or both tensors


def with_feedback(weights: Tensor, grid: Grid, unit: Tensor, order: list[int]) -> Tensor:
    """Levels of weights, where each column takes up the errors of those before it. `unit` is the upper factor of unit
    diagonal of the mean outer product (`U D Uᵀ`), columns in that order: nothing that rounds in this order does better."""
    width = weights.shape[2]
    sorted_weights = weights[..., order]
    levels, errors = torch.zeros_like(weights), torch.zeros_like(weights)
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        wanted = sorted_weights[..., start:end] + errors[..., :start] @ unit[:, :start, start:end]
        for at in range(start, end):
            column = order[at]
            level = grid.level(wanted[..., at - start], levels, column)
            levels[..., column] = level
            value = (level - grid.zero_point[..., column]) * grid.scale[..., column]
            errors[..., at] = sorted_weights[..., at] - value
            wanted[..., at - start + 1 :] += errors[..., at : at + 1] * unit[:, at : at + 1, at + 1 : end]
    return levels


def by_coordinate(weights: Tensor, start: Tensor, grid: Grid, products: Tensor, order: list[int]) -> Tensor:
    """Levels from which no change of a single one lowers the error, or those after some sweeps. `products` are in that
    order, `start` is not."""
    width = weights.shape[2]
    levels, errors = start.clone(), (weights - grid.values(start))[..., order]
    diagonal = products.diagonal(dim1=1, dim2=2)
    for _ in range(SWEEPS):
        before = levels.clone()
        for first in range(0, width, BLOCK):
            last = min(first + BLOCK, width)
            pull = errors @ products[:, :, first:last]
            for at in range(first, last):
                column = order[at]
                scale = grid.scale[..., column]
                value = (levels[..., column] - grid.zero_point[..., column]) * scale
                level = grid.level(value + pull[..., at - first] / diagonal[:, at : at + 1], levels, column)
                step = (level - levels[..., column]) * scale
                levels[..., column] = level
                errors[..., at] -= step
                pull -= step.unsqueeze(2) * products[:, at : at + 1, first:last]
        if torch.equal(before, levels):
            break
    return levels
