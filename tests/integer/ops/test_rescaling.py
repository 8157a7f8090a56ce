"""Integers brought from one grid to another, rounded once."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.integer_matches import NARROW, both, less, onto_grid, same, some_integers, some_multiplier


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), max_size=3), st.integers(0, 2**32 - 1), st.sampled_from((*NARROW, torch.int32)))
def test_requantized_numbers_are_rounded_once(shape: list[int], seed: int, dtype: torch.dtype) -> None:
    generator = np.random.default_rng(seed)
    x, zero_point = some_integers(generator, shape, dtype), 0 if dtype == torch.int32 else 7
    multiplier = some_multiplier(generator) / (2**24 if dtype == torch.int32 else 1)
    found = both("requantize", x, zero_point, multiplier, None, -4, -128, 127, torch.int8)
    steps = less(x, zero_point).astype(np.float64) * float(multiplier)
    assert same(found, onto_grid(steps, -4, -128, 127, torch.int8))


def test_ties_go_to_the_even_step_and_the_ends_are_kept() -> None:
    x = torch.tensor([1, 3, 5, -1, -3, 127, -128], dtype=torch.int8)
    out = (10, -5, 40, torch.int8)
    expected = [10, 12, 12, 10, 8, 40, -5]  # 0.5, 1.5, 2.5, -0.5, -1.5, and beyond both ends
    assert both("requantize", x, 0, torch.tensor(0.5).double(), None, *out).tolist() == expected
    assert both("requantize", x, 0, torch.tensor(2**30), torch.tensor(31), *out).tolist() == expected


def test_a_grid_of_its_own_gives_the_integers_back() -> None:
    x = torch.arange(256).to(torch.uint8)
    assert torch.equal(both("requantize", x, 7, torch.tensor(1.0).double(), None, 7, 0, 255, torch.uint8), x)


def test_each_channel_has_its_multiplier_and_results_may_be_float() -> None:
    x = torch.tensor([[10, 20], [30, 40]], dtype=torch.uint8)
    steps = torch.tensor([[0.5], [0.25]]).double()
    assert both("requantize", x, 10, steps, None, 0, 0, 255, torch.uint8).tolist() == [[0, 5], [5, 8]]
    assert both("requantize", x, 10, steps, None, 0, 0, 0, torch.float32).tolist() == [[0.0, 5.0], [5.0, 7.5]]
