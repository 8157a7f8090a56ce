"""The error of a layer's output, against rows that torch multiplies in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantc.observe import Gram
from quantc.observe.statistic_registry import STATISTICS
from quantc.observe.tokens import Tokens
from quantc.recover.objective import Moments, Objective, damped, remaining, share_added, why_not
from quantc.spec.halves import Halves

GROUPS, ROWS, WIDTH, OUTPUTS = 2, 50, 8, 3


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments(rows: Tensor) -> Moments:
    return Moments(rows.mT @ rows / rows.shape[1], rows.mean(1), rows.shape[1])


def halves(*batches: Tensor) -> Halves:
    found = Halves.empty(Gram, {})
    for number, rows in enumerate(batches):
        found.update(rows, batch=number)
    return found


def test_the_error_is_that_of_the_output() -> None:
    rows, change, shift = drawn(GROUPS, ROWS, WIDTH) + 1, drawn(GROUPS, OUTPUTS, WIDTH, seed=1), drawn(GROUPS, OUTPUTS)
    # the float layer has W and b, the rounded one W - change and b + shift
    output = rows @ change.mT - shift.unsqueeze(1)
    found = moments(rows)
    torch.testing.assert_close(found.error(change, shift), output.square().mean(1))
    torch.testing.assert_close(found.error(change), (rows @ change.mT).square().mean(1))
    torch.testing.assert_close(found.drift(change), (rows @ change.mT).mean(1))
    best = found.drift(change)
    left = Moments(found.about_mean(), torch.zeros_like(found.mean), ROWS).error(change)
    torch.testing.assert_close(found.error(change, best), left)
    assert bool((found.error(change, best) <= found.error(change, best + 0.01)).all())


def test_weights_that_met_nothing_count_a_little() -> None:
    rows = drawn(1, ROWS, WIDTH)
    rows[..., 0] = 0
    found, change = moments(rows), torch.zeros(1, 1, WIDTH, dtype=torch.float64)
    change[..., 0] = 1
    assert float(found.error(change)) == 0
    assert float(found.steady_error(change)) > 0


def test_merged_moments_are_those_of_all_rows() -> None:
    one, other = drawn(GROUPS, ROWS, WIDTH), drawn(GROUPS, 7, WIDTH, seed=3)
    both, whole = moments(one).merged(moments(other)), moments(torch.cat([one, other], dim=1))
    torch.testing.assert_close(both.products, whole.products)
    torch.testing.assert_close(both.mean, whole.mean)
    assert both.rows == whole.rows


def test_an_objective_fits_to_even_batches_and_judges_by_odd_ones() -> None:
    batches = [drawn(GROUPS, ROWS, WIDTH, seed=seed).float() for seed in range(4)]
    found = Objective.of([halves(*batches)])
    for half, rows in ((found.fit, batches[::2]), (found.judge, batches[1::2])):
        expected = moments(torch.cat(rows, dim=1).double())
        torch.testing.assert_close(half.products, expected.products, rtol=1e-3, atol=1e-3)
        assert half.rows == expected.rows
    both = found.of_all()
    assert both.fit.rows == 4 * ROWS
    assert both.fit is both.judge


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        ([], "no batch reached it"),
        ([drawn(1, 5, WIDTH).float()], "only one half of the batches reached it: there is nothing to judge on"),
        ([drawn(1, 5, 3).float()] * 2, "what was collected has 1x3 channels, and it reads 1x8"),
        ([drawn(1, 5, WIDTH).float()] * 2, None),
    ],
)
def test_why_there_is_no_objective(batches: list[Tensor], reason: str | None) -> None:
    assert why_not([halves(*batches)], (1, WIDTH)) == reason


@pytest.mark.parametrize("rank", [WIDTH, 2, 0])
def test_the_factor_is_of_the_products_and_what_was_added(rank: int) -> None:
    rows = drawn(GROUPS, ROWS, rank) @ drawn(GROUPS, rank, WIDTH, seed=1)
    rows[..., 3] = 0  # a dead channel
    products = rows.mT @ rows / ROWS
    matrix, unit, share = damped(products, ROWS)
    diagonal = torch.linalg.solve(unit, torch.linalg.solve(unit, matrix).mT)
    torch.testing.assert_close(unit.triu(), unit)
    torch.testing.assert_close(unit.diagonal(dim1=1, dim2=2), torch.ones(GROUPS, WIDTH, dtype=torch.float64))
    torch.testing.assert_close(diagonal, torch.diag_embed(diagonal.diagonal(dim1=1, dim2=2)), atol=1e-9, rtol=0)
    torch.testing.assert_close(remaining(matrix, unit), diagonal.diagonal(dim1=1, dim2=2))
    added = (matrix - products).diagonal(dim1=1, dim2=2)
    mean = products.diagonal(dim1=1, dim2=2).mean(1)
    alive = [index for index in range(WIDTH) if index != 3]
    if rank:
        torch.testing.assert_close(added[:, alive], (mean * share).unsqueeze(1).expand(GROUPS, WIDTH - 1))
    assert bool((unit[:, 3, :3] == 0).all())
    assert bool((unit[:, 3, 4:] == 0).all())  # nothing takes up what a dead channel's weights lose


def test_energies_alone_are_products_of_independent_inputs() -> None:
    rows = drawn(GROUPS, ROWS, WIDTH) + 1
    full = moments(rows)
    found = Moments(full.energy, full.mean, ROWS)
    expected = torch.diag_embed(rows.var(1, correction=0)) + full.mean.unsqueeze(2) * full.mean.unsqueeze(1)
    torch.testing.assert_close(found.products, expected)
    change, shift = drawn(GROUPS, OUTPUTS, WIDTH, seed=1), drawn(GROUPS, OUTPUTS)
    dense = Moments(expected, full.mean, ROWS)
    torch.testing.assert_close(found.error(change, shift), dense.error(change, shift))
    torch.testing.assert_close(found.steady_error(change, shift), dense.steady_error(change, shift))
    torch.testing.assert_close(found.merged(found).known, found.known)


@pytest.mark.parametrize("kind", ["moments", "gram"])
def test_objectives_of_all_statistics_agree_on_what_they_know(kind: str) -> None:
    seen = Halves.empty(STATISTICS[kind], {})
    batches = [drawn(GROUPS, ROWS, WIDTH, seed=seed).float() for seed in range(2)]
    for number, rows in enumerate(batches):
        seen.update(rows, batch=number)
    found = Objective.of([seen]).judge
    torch.testing.assert_close(found.energy, batches[1].double().square().mean(1), rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.mean, batches[1].double().mean(1), rtol=1e-3, atol=1e-3)


def test_counts_are_the_energy_of_the_rows_of_a_table() -> None:
    seen = Halves.empty(Tokens, {})
    for number in range(2):
        seen.update(torch.tensor([[0, 2, 2, 4]]), batch=number)
    found = Objective.of([seen], groups=6)
    assert found.fit.energy.flatten().tolist() == [0.25, 0, 0.5, 0, 0.25, 0]
    assert found.fit.rows == 4
    assert why_not([seen], (3, 1)) == "what was collected has 5 indices, and it has 3 rows"


def test_more_is_added_where_rows_are_few() -> None:
    assert share_added(64, 10**6) == 0.01
    assert share_added(64, 10) == 0.3
    assert 0.01 < share_added(64, 200) < 0.3
