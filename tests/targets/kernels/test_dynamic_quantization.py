"""Scales and zero points that kernels find as they run: the same as torch's, in fewer steps."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels.dynamic_quantization import RunTimeGrid, float32
from quantc.targets.kernels.kernel_table import Call, NoKernelError

EPS = 2.0**-14
AFFINE = RunTimeGrid(255, None, EPS)
MIDDLE = RunTimeGrid(254, 127, EPS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.floats(allow_nan=False))
def test_a_number_is_rounded_as_numpy_rounds_it(value: float) -> None:
    with np.errstate(over="ignore"):
        assert float32(value) == float(np.float32(value))


@settings(max_examples=80)
@given(low=st.floats(-1e4, 1e4, width=32), high=st.floats(-1e4, 1e4, width=32), span=st.sampled_from([255, 127, 15]))
def test_a_whole_tensor_has_the_scale_and_zero_point_of_torch(low: float, high: float, span: int) -> None:
    x = torch.tensor([low, high, (low + high) / 2])
    found = RunTimeGrid(span, None, EPS).of_whole(x)
    scale, zero_point = decomposed_ops().choose_qparams.tensor(x, 0, span, EPS, torch.uint8)
    assert found is not None
    assert found[0] == pytest.approx(float(scale), rel=2e-7)
    assert abs(found[1] - int(zero_point)) <= 1  # torch subtracts 0.5 ulp in another place
    assert 0 <= found[1] <= span
    # the levels reach what there is, and 0 is one of them
    steps = torch.tensor([low, high]).double() / found[0] + found[1]
    assert bool((steps > -0.51).all())
    assert bool((steps < span + 0.51).all())


def test_a_grid_about_zero_is_as_wide_as_the_largest() -> None:
    x = torch.tensor([-3.0, 1.0, 2.0])
    assert MIDDLE.of_whole(x) == (float32(3 / 127), 127)
    assert MIDDLE.of_whole(-x) == (float32(3 / 127), 127)


def test_zero_is_always_in_the_range() -> None:
    found = AFFINE.of_whole(torch.tensor([5.0, 10.0]))
    assert found == (float32(10 / 255), 0)
    assert AFFINE.of_whole(torch.tensor([-5.0, -10.0])) == (float32(10 / 255), 255)


@pytest.mark.parametrize("grid", [AFFINE, MIDDLE], ids=["affine", "symmetric"])
def test_no_scale_is_smaller_than_the_smallest(grid: RunTimeGrid) -> None:
    for x in (torch.zeros(3), torch.full((3,), 1e-30)):
        found = grid.of_whole(x)
        assert found is not None
        assert found[0] == EPS
        assert bool((grid.of_rows(x[None]).scale == EPS).all())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("grid", [AFFINE, MIDDLE], ids=["affine", "symmetric"])
def test_what_is_not_finite_has_no_grid(grid: RunTimeGrid, value: float) -> None:
    for place in range(3):
        x = torch.ones(3, 3)
        x[1, place] = value
        assert grid.of_whole(x) is None
        finite = grid.of_rows(x).scale.isfinite().flatten().tolist()
        assert finite == [True, False, True]


@pytest.mark.parametrize("grid", [AFFINE, RunTimeGrid(127, None, EPS), MIDDLE], ids=["affine", "narrow", "symmetric"])
def test_rows_have_the_grid_that_each_has_alone(grid: RunTimeGrid) -> None:
    x = numbers(6, 9) * torch.tensor([1e-3, 1.0, 50.0, 1e3, 1.0, 0.0])[:, None] + torch.arange(6.0)[:, None]
    rows = grid.of_rows(x.clone())
    for index, row in enumerate(x):
        alone = grid.of_whole(row)
        assert alone is not None
        scale, zero_point = alone
        assert float(rows.scale[index]) == pytest.approx(scale, rel=2e-7)
        if rows.lowest is not None:
            assert -float(rows.lowest[index]) == pytest.approx(zero_point, abs=1)
        levels = rows.steps[index].round()
        first = 0 if rows.lowest is None else rows.lowest[index]
        assert bool(((levels + first) * rows.scale[index] - row).abs().max() <= 0.51 * scale)
        assert (rows.lowest is None) == (grid.middle is not None)
        least, most = (-grid.middle, grid.span - grid.middle) if grid.middle is not None else (0, grid.span + 1)
        assert least <= float(levels.min())
        assert float(levels.max()) <= most


def test_rows_leave_their_input_alone() -> None:
    x = numbers(3, 5)
    before = x.clone()
    AFFINE.of_rows(x)
    MIDDLE.of_rows(x)
    assert torch.equal(x, before)


def grid_of(**arguments: Any) -> RunTimeGrid:
    return RunTimeGrid.of(cast("Call", {"x_zero_point": None, "eps": 1e-5, **arguments}))


def test_the_grid_of_a_call_begins_at_zero() -> None:
    assert grid_of(qmin=-128, qmax=127, x_zero_point=0) == RunTimeGrid(255, 128, float(np.float32(1e-5)))
    assert grid_of(qmin=0, qmax=127) == RunTimeGrid(127, None, float(np.float32(1e-5)))


def test_grids_of_more_than_a_byte_are_refused() -> None:
    assert grid_of(qmin=0, qmax=255).span == 255
    with pytest.raises(NoKernelError, match=r"-129\.\.127 needs more"):
        grid_of(qmin=-129, qmax=127)
