"""Ranges that make pair sums fit: the largest activation, and the factor by which weights must become coarser."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.integer.proof.factors import Factors, Weights
from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.proof.pair_sum_ranges import largest_activation, weight_factors
from quantc.spec.instruction_sets import INSTRUCTION_SETS
from tests.support.sums_of_pairs import MADDUBS, pairs_fit

rows = st.lists(st.integers(-128, 127), min_size=1, max_size=12)
NODE = torch.fx.Graph().placeholder("x")


def factors(row: list[int], qmax: int = 255) -> Factors:
    weights = torch.tensor(row).reshape(1, -1, 1)
    return Factors(NODE, Levels(0, qmax, torch.uint8, 0), Weights(weights, weights, True))


@settings(max_examples=100)
@given(row=rows)
def test_the_largest_activation_is_the_largest(row: list[int]) -> None:
    if pairs_fit(row, 255):
        return
    found = largest_activation(factors(row), MADDUBS)
    assert found is not None
    assert pairs_fit(row, found)
    assert not pairs_fit(row, found + 1)


def test_avx2_adds_pairs_as_the_simulation_does() -> None:
    assert INSTRUCTION_SETS["avx2"].pairs == INSTRUCTION_SETS["avx512"].pairs == replace(MADDUBS, neighbours="adjacent")
    assert MADDUBS.multiplied(0, 255, signed=False) == (0, 255)
    assert MADDUBS.multiplied(-128, 127, signed=True) == (0, 255)


def test_full_weights_leave_the_activations_just_above_seven_bits() -> None:
    assert largest_activation(factors([127, 127, -127, -127]), MADDUBS) == 129
    assert largest_activation(factors([-128, -128]), MADDUBS) == 128


def test_signed_activations_need_room_for_zero() -> None:
    weights = torch.tensor([[[-128], [-128]]])
    wraps = INSTRUCTION_SETS["neon-mlal"].pairs
    assert wraps is not None
    held = Factors(NODE, Levels(-128, 127, torch.int8, 0), Weights(weights, weights, True))
    assert held.pairs(wraps).highest == 2 * 128 * 128  # -128 · -128, twice: one more than 16 bits hold
    assert largest_activation(held, wraps) is None
    assert largest_activation(held, MADDUBS) is None  # 0, which is 128 there, is the last that would do


@settings(max_examples=80)
@given(row=rows, seed=st.integers(0, 2**16))
def test_the_weight_factor_suffices_for_whatever_was_rounded(row: list[int], seed: int) -> None:
    factor = weight_factors(factors(row), MADDUBS)[0]
    assert (factor == 1) == pairs_fit(row, 255)
    rng = np.random.default_rng(seed)
    real = np.array(row) + rng.choice([-0.499, 0.0, 0.499], len(row))
    again = [int(level) for level in np.rint(real / factor)]
    assert factor == 1 or pairs_fit(again, 255)


def test_a_signed_range_is_searched_and_the_one_above_does_not_fit() -> None:
    wraps = INSTRUCTION_SETS["neon-mlal"].pairs
    assert wraps is not None
    weights = torch.tensor([[[127], [127], [-3]]])
    held = Factors(NODE, Levels(-100, 200, torch.int16, 0), Weights(weights, weights, True))
    assert largest_activation(held, wraps) == 129  # 2 · 127 · 129 is 32766


def test_products_of_two_activations_have_no_factors() -> None:
    levels = Levels(0, 255, torch.uint8, 0)
    assert weight_factors(Factors(NODE, levels, levels, count=4), MADDUBS) == ()


def test_only_channels_that_can_saturate_need_a_factor() -> None:
    weights = torch.tensor([[[127], [127]], [[64], [64]], [[-128], [-128]]])
    found = weight_factors(Factors(NODE, Levels(0, 255, torch.uint8, 0), Weights(weights, weights, True)), MADDUBS)
    assert found[1] == 1.0
    # 254 and 256 must come to 128, with a step to spare for what was rounded
    assert 255 / 128 <= found[0] < found[2] < 258 / 128
