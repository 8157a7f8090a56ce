"""Norms and softmax of bytes, computed in float32 and rounded once."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.integer.grid import Grid
from quantc.integer.ops.integer_norms import eps_of, reciprocal_places
from quantc.integer.ops.softmax import powers_of
from tests.support.kernel_calls import FILLS, check, dtypes, grids, kernels_of, levels, number, seeds, zero_points


@settings(max_examples=80)
@given(
    kind=st.sampled_from(["layer", "layer of one number", "group", "instance", "instance of one number", "rms"]),
    fill=st.sampled_from(FILLS), dtype=dtypes, zero=zero_points, x_scale=st.floats(1e-3, 1.0), out=grids(), seed=seeds,
    step=st.floats(0.005, 0.1), with_offset=st.booleans(),
)  # fmt: skip
def test_norms(
    kind: str, fill: str, dtype: Any, zero: int, x_scale: float, out: Any, seed: int, step: float, with_offset: bool
) -> None:
    shape = (2, 5, 24) if kind.startswith(("layer", "rms")) else (2, 8, 4, 3)
    length = {"layer": 24, "rms": 24, "group": 48, "instance": 12}[kind.partition(" ")[0]]
    numbers = () if "one number" in kind else (24,) if kind in ("layer", "rms") else (8, 1, 1)
    gamma = (torch.rand(numbers, dtype=torch.float64) + 0.2) / step
    offset = torch.randn(numbers, dtype=torch.float64) / step if with_offset else None
    eps = eps_of(length, 255, 1e-5, x_scale)
    assert eps is not None
    multiplier = gamma * 2.0 ** -reciprocal_places(length)
    x = levels(shape, dtype, fill, seed)
    head = (x, zero, length, kind != "rms", eps.value, eps.places)
    steepest = float(gamma.max()) * x_scale / math.sqrt(1e-5) * 255 * 2.0**-23
    check("normalize", *head, multiplier, offset, None, *out, least=0 if steepest > 0.2 else 1)


def test_norms_of_groups_that_are_nearly_alike() -> None:
    """In any order in memory: where channels lie side by side, torch's own norm is 8 steps off."""
    x = torch.full((2, 8, 4, 3), 186, dtype=torch.uint8)
    x[0, 0, 3, 1] = 187
    eps = eps_of(48, 255, 1e-5, 1.0)
    assert eps is not None
    multiplier = torch.full((8, 1, 1), 19.0).double() * 2.0 ** -reciprocal_places(48)
    check("normalize", x, 0, 48, True, eps.value, eps.places, multiplier, None, None, 0, 0, 255, torch.uint8)


def test_norms_of_rows_that_are_all_alike_are_refused_where_float32_would_not_do() -> None:
    """A scale so large that eps comes to nothing beside it."""
    x = levels((4, 16), torch.uint8, "alike", 0)
    eps = eps_of(16, 255, 1e-5, 100.0)
    assert eps is not None
    multiplier = torch.full((16,), 50.0).double() * 2.0 ** -reciprocal_places(16)
    head = (x, 0, 16, True, eps.value, eps.places)
    assert kernels_of("normalize", *head, multiplier, None, None, 0, 0, 255, torch.uint8)[0] == []


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(3, 7), (2, 4, 9), (1, 3, 5, 33), (1, 1), (2, 300)]), dim=st.integers(0, 3), fill=st.sampled_from(
    FILLS), dtype=dtypes, x_scale=st.floats(1e-4, 60.0), step=st.sampled_from([1 / 256, 1 / 128, 1 / 300, 0.003]),
    seed=seeds,
)  # fmt: skip
def test_softmax(shape: Any, dim: int, fill: str, dtype: Any, x_scale: float, step: float, seed: int) -> None:

    dim %= len(shape)
    grid = Grid(number(x_scale), torch.tensor(0), 0, 255, dtype)
    is_power = math.log2(1 / step).is_integer()
    table = powers_of(grid, shape[dim], 9 if is_power else 0)
    ending = (torch.tensor(round(2 / step)), torch.tensor(1)) if is_power else (number(1 / step), None)
    lowest = torch.iinfo(dtype).min
    check("softmax", levels(shape, dtype, fill, seed), table, dim, *ending, lowest, lowest, lowest + 255, dtype)
