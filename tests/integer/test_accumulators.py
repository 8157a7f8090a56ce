"""Plans of accumulators: how far sums reach, in how many parts float32 holds them, and biases that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quantc.integer.accumulators import AccumulatedWeight, accumulation, centered_range, fit_scales
from quantc.integer.grid import Grid
from quantc.integer.match_lowering import NotIntegerError


def test_products_of_two_activations_are_held_to_the_range_of_both() -> None:
    wide = Grid(torch.tensor(0.1).double(), torch.tensor(0), 0, 255, torch.uint8)
    longest = (2**31 - 1) // 255**2
    assert accumulation(wide, AccumulatedWeight(wide, None), None, longest).largest == longest * 255**2
    with pytest.raises(NotIntegerError, match="33 bits"):
        accumulation(wide, AccumulatedWeight(wide, None), None, longest + 1)
    with pytest.raises(NotIntegerError, match="33 bits"):
        accumulation(wide, AccumulatedWeight(wide, None), torch.tensor([2**30], dtype=torch.int32), longest)


@pytest.mark.parametrize(("qmax", "parts"), [(256, 1), (257, 0)])
def test_factors_too_wide_for_bfloat16_are_multiplied_in_float64(qmax: int, parts: int) -> None:
    grid = Grid(torch.tensor(0.1).double(), torch.tensor(0), 0, qmax, torch.int16)
    assert accumulation(grid, AccumulatedWeight(grid, torch.ones(1, 4, dtype=torch.int8)), None, 4).parts == parts


def grid(scale: object, zero_point: object = 0, *, axis: int | None = None) -> Grid:
    scales = torch.tensor(scale, dtype=torch.float64)
    return Grid(scales, torch.tensor(zero_point).expand(scales.shape), -128, 127, torch.int8, axis)


WIDE = Grid(torch.tensor(0.1).double(), torch.tensor(0), 0, 255, torch.uint8)


def test_known_weights_are_held_to_what_they_can_reach() -> None:
    w = torch.tensor([[3, -4], [100, 100]], dtype=torch.int8)
    bias = torch.tensor([0, 7], dtype=torch.int32)
    found = accumulation(WIDE, AccumulatedWeight(grid(1.0), w), bias, None)
    assert found.largest == 255 * 200 + 7
    assert found.parts == 1
    # where activations lie on both sides of zero, the least sum may be the farthest
    both = replace(WIDE, zero_point=torch.tensor(250))
    assert accumulation(both, AccumulatedWeight(grid(1.0), w), None, None).largest == 250 * 200


def test_how_many_are_summed_must_be_known_for_factors_that_are_not() -> None:
    with pytest.raises(NotIntegerError, match="not known before it runs"):
        accumulation(WIDE, AccumulatedWeight(WIDE, None), None, None)


def test_products_of_two_activations_go_in_parts_that_float32_holds() -> None:
    most = (2**24 - 1) // 255**2
    parts = [accumulation(WIDE, AccumulatedWeight(WIDE, None), None, n).parts for n in (most, most + 1, 4 * most)]
    assert parts == [1, 2, 4]


def test_the_range_less_the_zero_points_is_the_widest_there_is() -> None:
    assert centered_range(grid(1.0, 5)) == (-133, 122)
    assert centered_range(grid([1.0, 1.0], [-3, 10], axis=0)) == (-138, 130)


def test_scales_go_with_output_channels_and_with_the_integers() -> None:
    scales = torch.tensor([0.5, 2.0, 3.0]).double()
    w = torch.zeros(4, 3, 2, dtype=torch.int8)
    turned = AccumulatedWeight(grid([0.5, 2.0, 3.0], axis=1), w, "transposed", groups=2)
    assert turned.by_output(scales).tolist() == [0.5, 2.0, 3.0, 0.5, 2.0, 3.0]  # again for each group
    assert tuple(turned.along_axis(scales).shape) == (1, 3, 1)
    rows = AccumulatedWeight(grid([0.5, 2.0, 3.0], axis=0), w.transpose(0, 1).contiguous())
    assert rows.by_output(scales).tolist() == [0.5, 2.0, 3.0]
    whole = AccumulatedWeight(grid(0.5), w, "transposed", groups=2)
    assert float(whole.by_output(torch.tensor(0.5))) == 0.5


def test_centered_weights_are_the_integers_less_the_zero_point_of_their_channel() -> None:
    w = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
    by_row = AccumulatedWeight(grid([1.0, 1.0], [1, -1], axis=0), w).centered()
    by_column = AccumulatedWeight(grid([1.0, 1.0], [1, -1], axis=1), w, "columns").centered()
    assert by_row is not None
    assert by_column is not None
    assert by_row[:, :, 0].tolist() == [[0, 1], [4, 5]]
    assert by_column[:, :, 0].tolist() == [[0, 2], [3, 5]]
    several = AccumulatedWeight(grid(1.0), w.expand(3, 2, 2), "columns")
    assert several.centered() is None  # of several matrices only the ranges count


# -- biases that do not fit ----------------------------------------------------------------------------------------


def test_a_bias_that_fits_changes_nothing() -> None:
    w = AccumulatedWeight(grid(0.5), torch.tensor([[10, -20]], dtype=torch.int8))
    assert fit_scales(w, torch.tensor([1.0]), torch.tensor(0.5).double()) == (w, 0)


def test_scales_are_raised_only_where_the_bias_asks_for_it_and_the_weight_stays() -> None:
    levels = torch.tensor([[100, -50], [100, -50]], dtype=torch.int8)
    w = AccumulatedWeight(grid([2.0**-20, 2.0**-20], axis=0), levels)
    step, bias = torch.tensor(2.0**-10).double(), torch.tensor([0.5, 8.0])
    made, raised = fit_scales(w, bias, step)
    assert raised == 1
    assert made.grid.scale.tolist() == [2.0**-20, 2.0**-17]  # 8 is 2^30 steps of 2^-27
    assert made.levels is not None
    assert made.levels.tolist() == [[100, -50], [12, -6]]  # an eighth, ties to even
    assert bool((bias.double() / (step * made.grid.scale)).abs().le(2**30).all())


def test_one_scale_for_all_is_raised_for_all_and_factors_that_come_are_refused() -> None:
    levels = torch.tensor([[100], [100]], dtype=torch.int8)
    step, bias = torch.tensor(2.0**-10).double(), torch.tensor([0.5, 8.0])
    made, raised = fit_scales(AccumulatedWeight(grid(2.0**-20), levels), bias, step)
    assert (raised, made.grid.one_scale) == (1, 2.0**-17)
    with pytest.raises(NotIntegerError, match="more than 2\\^30 steps"):
        fit_scales(AccumulatedWeight(grid(2.0**-20), None), bias, step)
