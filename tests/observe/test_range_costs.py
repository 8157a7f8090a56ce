"""The fast estimate of a range's cost: tails against the elements themselves, and searches against every candidate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantc.observe.buckets import Cells, Floats, cells_of, count_buckets
from quantc.observe.range_costs import Tail, best_ends, best_reach, between_neighbours, grid_of, two_tails
from quantc.spec.spec import INT8, QuantSpec

SYMMETRIC = INT8.but(dtype="int4", scheme="symmetric")


def cells(x: Tensor) -> Cells:
    hit, counts = count_buckets(x, is_positive=False)
    return cells_of(hit, counts, float(x.min()), float(x.max()))


def normal(count: int = 4000) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def clipped(x: Tensor, reach: float) -> tuple[float, float]:
    """The number of elements of one side beyond a magnitude, and the sum of their squared errors."""
    over = (x.double() - reach).clamp(min=0)
    return float((over > 0).sum()), float(over.square().sum())


def test_tails_clip_what_the_elements_say() -> None:
    x = normal()
    below, above = two_tails(cells(x))
    reaches = np.array([0.5, 1.0, 2.0, 2.5])
    for tail, side in ((below, -x), (above, x)):
        counts, costs = tail(reaches)
        for index, reach in enumerate(reaches.tolist()):
            expected = clipped(side, reach)
            assert counts[index] == pytest.approx(expected[0], rel=0.05)
            assert costs[index] == pytest.approx(expected[1], rel=0.05)


def test_uniform_cells_have_the_moments_of_a_uniform_distribution() -> None:
    tail = Tail.of(np.array([0.0]), np.array([3.0]), np.array([30.0]))
    counts, costs = tail(np.array([0.0, 3.0]))
    assert counts.tolist() == [30.0, 0.0]
    assert costs[0] == pytest.approx(30 * 3.0)  # the mean square of 0..3 is 3
    assert costs[1] == 0.0


def test_a_side_without_elements_clips_nothing() -> None:
    below, above = two_tails(cells(normal().abs()))
    counts, costs = below(np.array([0.1, 1.0]))
    assert (counts.tolist(), costs.tolist()) == ([0, 0], [0, 0])
    assert above(np.array([0.1]))[0][0] > 0


def squared_error(x: Tensor, down: float, up: float, spec: QuantSpec) -> float:
    """Rounding error of a uniform density inside, and the clipping error of the elements outside."""
    scale = (down + up) / (spec.levels - 1)
    over, under = clipped(x, up), clipped(-x, down)
    return (len(x) - over[0] - under[0]) * scale**2 / 12 + over[1] + under[1]


def test_the_best_reach_costs_no_more_than_any_of_a_fine_grid() -> None:
    x = normal()
    found = best_reach(cells(x), grid_of(4.0, 0.1, 48), SYMMETRIC)
    tried = [squared_error(x, reach, reach, SYMMETRIC) for reach in np.linspace(0.5, 4.0, 80).tolist()]
    assert squared_error(x, found, found, SYMMETRIC) <= min(tried) * 1.02


def test_the_best_ends_of_lopsided_data_are_lopsided() -> None:
    x = torch.where(normal() < 0, normal() * 0.2, normal())
    grid = grid_of(4.0, 0.02, 48)
    spec = INT8.but(dtype="int4")
    down, up = best_ends(cells(x), grid, grid, spec)
    assert down < 0.5 * up
    ends = np.linspace(0.05, 3.5, 40).tolist()
    tried = [squared_error(x, low, high, spec) for low in ends for high in ends]
    assert squared_error(x, down, up, spec) <= min(tried) * 1.03


def test_grids_are_geometric_with_the_widest_first() -> None:
    grid: Floats = grid_of(8.0, 1.0, 4)
    assert grid.tolist() == pytest.approx([8, 4, 2, 1])
    assert grid_of(8.0, 0.0, 4).tolist() == [8.0]  # zero is no end of a geometric grid
    assert grid_of(1.0, 1.0, 4).tolist() == [1.0]


def test_a_finer_grid_spans_the_neighbours_of_the_best() -> None:
    grid = grid_of(8.0, 1.0, 4)
    assert between_neighbours(grid, 1, 3).tolist() == pytest.approx([8, 4, 2])
    assert between_neighbours(grid, 0, 2).tolist() == pytest.approx([8, 4])  # at an end there is one neighbour
    assert between_neighbours(grid, 3, 2).tolist() == pytest.approx([2, 1])
