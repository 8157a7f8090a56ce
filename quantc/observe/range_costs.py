"""Fast estimate of the cost of a range: uniform rounding error inside it, clipping error outside.

Cumulative sums over the cells are computed once; a whole plane of ranges then costs a few additions each. The estimate
is wrong for data on a few values only, so callers check a few candidates by the exact formula.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quantc.observe.buckets import Cells, Floats
from quantc.spec.spec import QuantSpec

COARSE, FINE = 48, 10
"""The number of candidates for an end: over the whole interval, then twice between the neighbours of the best."""


@dataclass(frozen=True)
class Tail:
    """One side of the data as magnitudes: mass and moments beyond a threshold."""

    edges: Floats
    beyond: Floats
    """Three rows: count, sum and sum of squares of the elements beyond each edge."""

    @staticmethod
    def of(left: Floats, right: Floats, mass: Floats) -> Tail:
        """The tail of cells in ascending order of magnitude."""
        sums = np.stack([mass, mass * (left + right) / 2, mass * (left * left + left * right + right * right) / 3])
        after = np.cumsum(sums[:, ::-1], 1)[:, ::-1]
        edges = np.stack([left, right], 1).reshape(-1)
        beyond = np.stack([after, after - sums], 2).reshape(3, -1)
        return Tail(edges, beyond)

    def __call__(self, reach: Floats) -> tuple[Floats, Floats]:
        """The number of elements clipped at some magnitudes, and the sum of their squared errors."""
        if not len(self.edges):
            return np.zeros_like(reach), np.zeros_like(reach)
        count, total, squares = (np.interp(reach, self.edges, row) for row in self.beyond)
        return count, np.maximum(squares - 2 * reach * total + reach * reach * count, 0.0)


def two_tails(cells: Cells) -> tuple[Tail, Tail]:
    """The tails below and above zero, by magnitude."""
    below, above = cells.only(cells.middle < 0), cells.only(cells.middle > 0)
    return Tail.of(-below.right[::-1], -below.left[::-1], below.mass[::-1]), Tail.of(
        above.left, above.right, above.mass
    )


def best_ends(cells: Cells, downs: Floats, ups: Floats, spec: QuantSpec) -> tuple[float, float]:
    """The extents below and above zero of the range of least estimated cost. Candidates come widest first."""
    below, above = two_tails(cells)
    size = float(cells.mass.sum())
    down, up = 0, 0
    for count in (FINE, FINE, 0):
        clipped_down, cost_down = below(downs)
        clipped_up, cost_up = above(ups)
        scale = np.maximum((downs[:, None] + ups) / (spec.levels - 1), spec.eps)
        inside = size - clipped_down[:, None] - clipped_up
        cost = scale * scale / 12 * inside + cost_down[:, None] + cost_up
        down, up = divmod(int(cost.argmin()), len(ups))
        if count:
            downs, ups = between_neighbours(downs, down, count), between_neighbours(ups, up, count)
    return float(downs[down]), float(ups[up])


def best_reach(cells: Cells, reaches: Floats, spec: QuantSpec) -> float:
    """The same for symmetric ranges."""
    below, above = two_tails(cells)
    size = float(cells.mass.sum())
    best = 0
    for count in (FINE, FINE, 0):
        (clipped_down, cost_down), (clipped_up, cost_up) = below(reaches), above(reaches)
        scale = np.maximum(2 * reaches / (spec.levels - 1), spec.eps)
        cost = scale * scale / 12 * (size - clipped_down - clipped_up) + cost_down + cost_up
        best = int(cost.argmin())
        if count:
            reaches = between_neighbours(reaches, best, count)
    return float(reaches[best])


def between_neighbours(grid: Floats, best: int, count: int) -> Floats:
    """A finer grid around the best point of a coarse one."""
    return grid_of(float(grid[max(best - 1, 0)]), float(grid[min(best + 1, len(grid) - 1)]), count)


def grid_of(most: float, least: float, count: int) -> Floats:
    """A geometric grid of thresholds, the widest first."""
    if most <= least or least <= 0:
        return np.array([most])
    return most * (least / most) ** (np.arange(count) / (count - 1))
