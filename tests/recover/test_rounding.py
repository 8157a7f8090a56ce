"""Rounding with feedback against the published form with inverses; coordinate descent against trying every level."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quantc.recover.objective import damped
from quantc.recover.pair_limits import Neighbours
from quantc.recover.rounding import BLOCK, Columns, Grid, by_coordinate, with_feedback
from tests.support.recovery import by_inverses


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(width: int, outputs: int = 5, neighbours: Neighbours | None = None) -> tuple[Tensor, Tensor, Grid]:
    rows = drawn(2, 3 * width, width) @ drawn(2, width, width, seed=1) + 0.3
    weights = drawn(2, outputs, width, seed=2)
    scale = weights.abs().amax(2, keepdim=True).expand_as(weights) / 7
    return rows.mT @ rows / rows.shape[1], weights, Grid(scale, torch.zeros_like(scale), -8, 7, neighbours)


@pytest.mark.parametrize("width", [3, 40, BLOCK + 9])
def test_feedback_is_that_of_the_published_form(width: int) -> None:
    products, weights, grid = problem(width)
    matrix, unit, _ = damped(products, 3 * width)
    columns = Columns(weights, grid, list(range(width)))
    with_feedback(columns, unit)
    assert torch.equal(columns.result(), by_inverses(weights, matrix, grid))


def test_the_order_of_columns_is_undone() -> None:
    products, weights, grid = problem(12)
    order = drawn(12, seed=9).argsort().tolist()
    matrix, unit, _ = damped(products[:, order][:, :, order], 36)
    columns = Columns(weights, grid, order)
    with_feedback(columns, unit)
    turned = Grid(grid.scale[..., order], grid.zero_point[..., order], grid.qmin, grid.qmax)
    expected = by_inverses(weights[..., order], matrix, turned)
    assert torch.equal(columns.result()[..., order], expected)


def test_without_correlation_it_rounds_to_nearest() -> None:
    _, weights, grid = problem(10)
    _, unit, _ = damped(torch.diag_embed(torch.rand(2, 10, dtype=torch.float64) + 0.1), 1000)
    columns = Columns(weights, grid, list(range(10)))
    with_feedback(columns, unit)
    assert torch.equal(columns.result(), (weights / grid.scale).round().clamp(-8, 7))


def error(weights: Tensor, levels: Tensor, grid: Grid, products: Tensor) -> Tensor:
    change = weights - levels * grid.scale
    return (change @ products * change).sum(2)


def test_descent_ends_where_no_single_level_is_better() -> None:
    products, weights, grid = problem(9)
    columns = Columns(weights, grid, list(range(9)))
    start = (weights / grid.scale).round().clamp(-8, 7)
    columns.start(start)
    by_coordinate(columns, products, sweeps=100)
    levels = columns.result()
    best = error(weights, levels, grid, products)
    assert bool((best <= error(weights, start, grid, products) + 1e-12).all())
    assert bool((best < error(weights, start, grid, products)).any())
    for column in range(9):
        for level in range(-8, 8):
            other = levels.clone()
            other[..., column] = level
            assert bool((error(weights, other, grid, products) >= best - 1e-9).all())


def test_neighbours_stay_within_their_limits() -> None:
    limits = Neighbours(tuple((index ^ 1,) for index in range(10)), 9, 9)
    products, weights, grid = problem(10, neighbours=limits)
    order = list(range(10))[::-1]
    matrix, unit, _ = damped(products[:, order][:, :, order], 30)
    columns = Columns(weights, grid, order)
    with_feedback(columns, unit)
    by_coordinate(columns, matrix)
    pairs = columns.result().reshape(2, 5, 5, 2)
    assert float(pairs.clamp(min=0).sum(3).max()) <= 9
    assert float(pairs.clamp(max=0).sum(3).min()) >= -9
    free = (weights / grid.scale).round().clamp(-8, 7).reshape(2, 5, 5, 2)
    assert float(free.clamp(min=0).sum(3).max()) > 9  # the limit binds
    assert np.isfinite(columns.errors).all()


def test_little_is_left_to_the_best_of_all_levels() -> None:
    """Two bits and six columns: all 4,096 roundings of each output, against feedback and one sweep."""
    rows = drawn(2, 60, 6) @ drawn(2, 6, 6, seed=1)
    products, weights = rows.mT @ rows / 60, drawn(2, 20, 6, seed=2)
    scale = weights.abs().amax(2, keepdim=True).expand_as(weights) / 2
    grid = Grid(scale, torch.zeros_like(scale), -2, 1)
    every = torch.cartesian_prod(*[torch.arange(-2.0, 2.0, dtype=torch.float64)] * 6)
    changes = weights.unsqueeze(2) - every * scale[:, :, :1].unsqueeze(2)
    best = (changes @ products.unsqueeze(1) * changes).sum(3).amin(2)
    order = products.diagonal(dim1=1, dim2=2).sum(0).argsort(descending=True).tolist()
    matrix, unit, _ = damped(products[:, order][:, :, order], 10**6)
    columns = Columns(weights, grid, order)
    with_feedback(columns, unit)
    by_coordinate(columns, matrix, sweeps=1)
    found = error(weights, columns.result(), grid, products)
    nearest = error(weights, (weights / scale).round().clamp(-2, 1), grid, products)
    assert bool((found >= best - 1e-9).all())
    assert float(found.sum() - best.sum()) < 0.2 * float(nearest.sum() - best.sum())
