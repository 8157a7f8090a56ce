"""The bounds of sums: never a false "safe", and "can saturate" only where an input exists that does it.

The other side is NumPy and Python integers: an accumulator of 16-bit pairs that saturates, and sums without limits.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from quantc.integer.proof.bounds import (
    FLOAT32_EXACT,
    bits_of,
    by_channel,
    centered_by_channel,
    exact_in_float32_parts,
    pair_reach,
    parts_of,
    range_reach,
    sum_reach,
)
from quantc.integer.proof.factors import Factors, Weights
from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.proof.pair_sum_ranges import largest_activation, weight_factors
from quantc.integer.proof.weight_fitting import PairFit
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.instruction_sets import INSTRUCTION_SETS, PairSums
from quantc.spec.numerics import QParams, quantize
from quantc.spec.spec import INT8_NARROW_WEIGHT, INT8_WEIGHT

Ints = npt.NDArray[np.int64]
INT16 = (-(2**15), 2**15 - 1)
MADDUBS = PairSums("unsigned", "saturates")

rows = st.lists(st.integers(-128, 127), min_size=1, max_size=12)
NODE = torch.fx.Graph().placeholder("x")


def saturating_pairs(x: Ints, w: Ints) -> int:
    """Neighbours multiplied, added in 16 bits with saturation, and the pairs added without limit."""
    if len(x) % 2:
        x, w = np.append(x, 0), np.append(w, 0)
    pairs = (x * w).reshape(-1, 2).sum(axis=1)
    return int(np.clip(pairs, *INT16).sum())


def adversaries(w: Ints, qmin: int, qmax: int) -> list[Ints]:
    """The inputs that make sums as large and as small as they can be."""
    return [np.where(w > 0, qmax, qmin), np.where(w < 0, qmax, qmin), np.full_like(w, qmax)]


def worst_first(w: Ints, sign: int) -> Ints:
    """The two weights that make the largest, or smallest, sum become neighbours."""
    return w[np.argsort(-sign * w, kind="stable")]


# -- pairs -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(row=rows, qmax=st.integers(1, 255), seed=st.integers(0, 2**16))
def test_pairs_saturate_just_where_the_bound_says(row: list[int], qmax: int, seed: int) -> None:
    w = np.array(row)
    reach = pair_reach(torch.tensor(row).reshape(1, -1, 1), 0, qmax)
    can_saturate = bool(reach.beyond(16).item())
    rng = np.random.default_rng(seed)
    layouts = [w, worst_first(w, 1), worst_first(w, -1), rng.permutation(w)]
    seen = False
    for layout in layouts:
        for x in (*adversaries(layout, 0, qmax), rng.integers(0, qmax + 1, len(w))):
            seen |= saturating_pairs(x, layout) != int((x * layout).sum())
    assert seen == can_saturate


@settings(max_examples=100)
@given(row=rows, low=st.integers(-128, 0), high=st.integers(0, 255))
def test_pair_bounds_are_reached(row: list[int], low: int, high: int) -> None:
    reach = pair_reach(torch.tensor(row).reshape(1, -1, 1), low, high)
    products = [sorted((w * low, w * high, 0)) for w in row]
    highest = sum(sorted((p[2] for p in products), reverse=True)[:2])
    lowest = sum(sorted(p[0] for p in products)[:2])
    assert (reach.lowest, reach.highest) == (lowest, highest)


def factors(row: list[int], qmax: int = 255) -> Factors:
    weights = torch.tensor(row).reshape(1, -1, 1)
    return Factors(NODE, Levels(0, qmax, torch.uint8, 0), Weights(weights, weights, True))


def pairs_fit(row: list[int], qmax: int) -> bool:
    """Whether any two products, or one, fit 16 bits: by trying all."""
    sums = [0, *(qmax * w for w in row), *(qmax * (a + b) for a, b in itertools.combinations(row, 2))]
    return INT16[0] <= min(sums) and max(sums) <= INT16[1]


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


@settings(max_examples=60)
@given(
    values=st.lists(st.lists(st.floats(-1, 1, width=32), min_size=6, max_size=6), min_size=1, max_size=4),
    qmax=st.sampled_from([255, 200, 255]),
    whole=st.booleans(),
)
def test_raised_scales_are_the_smallest_that_fit(values: list[list[float]], qmax: int, whole: bool) -> None:
    weight = torch.tensor(values, dtype=torch.float32)
    spec = INT8_NARROW_WEIGHT.but(granularity=PerTensor() if whole else PerChannel(axis=0))
    largest = weight.abs().amax(dim=() if whole else 1).clamp(min=1e-3)
    scale = (largest / 127).float()
    fitted = PairFit(weight.unsqueeze(-1), spec, Levels(0, qmax, torch.uint8), MADDUBS).least(scale)

    def fits(scales: Tensor) -> list[bool]:
        levels = quantize(weight, QParams(scales, torch.zeros_like(scales, dtype=torch.int64)), spec).tolist()
        each = [pairs_fit(row, qmax) for row in levels]
        return [all(each)] if whole else each

    assert all(fits(fitted))
    below = torch.nextafter(fitted, torch.zeros_like(fitted))
    raised = (fitted > scale).reshape(-1).tolist()
    assert all(not ok for ok, up in zip(fits(torch.where(fitted > scale, below, scale)), raised, strict=True) if up)
    assert [not up for up in raised] == fits(scale)


# -- accumulators ----------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(row=rows, zero_point=st.integers(0, 255), wz=st.integers(-5, 5), bias=st.integers(-(2**30), 2**30))
def test_accumulator_bounds_are_reached_and_never_left(row: list[int], zero_point: int, wz: int, bias: int) -> None:
    weights = centered_by_channel(torch.tensor([row]).to(torch.int8), torch.tensor(wz))
    reach = sum_reach(weights, 0 - zero_point, 255 - zero_point, torch.tensor([bias]))
    terms = [[(x - zero_point) * (w - wz) for x in (0, 255)] for w in row]
    most, least = sum(max(0, *t) for t in terms), sum(min(0, *t) for t in terms)
    assert reach.highest == max(most, most + bias)
    assert reach.lowest == min(least, least + bias)
    assert reach.bits == min(n for n in range(1, 64) if _holds(reach.lowest, reach.highest, n))


def _holds(low: int, high: int, bits: int) -> bool:
    limit = int(2 ** (bits - 1))
    return -limit <= low and high < limit


@given(st.integers(-(2**40), 2**40))
def test_bits_of_an_integer_are_the_fewest_that_hold_it(value: int) -> None:
    bits = bits_of(value)
    assert _holds(value, value, bits)
    assert bits == 1 or not _holds(value, value, bits - 1)


@pytest.mark.parametrize("length", [66_311, 66_312])
def test_the_32_bits_of_an_accumulator_end_where_they_end(length: int) -> None:
    """255 · 127 · 66 311 is the last multiple below 2^31."""
    reach = sum_reach(torch.full((1, length, 1), 127), 0, 255)
    assert reach.highest == 255 * 127 * length
    assert reach.fits_int32 == (255 * 127 * length < 2**31) == (length == 66_311)


def test_products_of_two_activations_are_bounded_by_their_ranges() -> None:
    reach = range_reach(5, (-128, 127), (-100, 155))
    corners = [a * b for a in (-128, 127) for b in (-100, 155)]
    assert (reach.lowest, reach.highest) == (5 * min(corners), 5 * max(corners))


@settings(max_examples=25)
@given(groups=st.sampled_from([1, 2]), dilation=st.integers(1, 2), seed=st.integers(0, 99))
def test_the_bound_of_a_convolution_is_what_torch_reaches(groups: int, dilation: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randint(-128, 128, (4, 3, 2, 2), generator=generator)
    reach = sum_reach(by_channel(w), -10, 245)
    for channel in range(4):
        x = torch.zeros(1, 3 * groups, 1 + dilation, 1 + dilation)
        own = slice(3 * (channel // (4 // groups)), 3 * (channel // (4 // groups)) + 3)
        x[0, own, ::dilation, ::dilation] = torch.where(w[channel] > 0, 245.0, -10.0)
        out = F.conv2d(x.double(), w.double(), dilation=dilation, groups=groups)
        assert int(out[0, channel, 0, 0]) == int(reach.high[channel])


@settings(max_examples=25)
@given(groups=st.sampled_from([1, 2]), seed=st.integers(0, 99))
def test_the_bound_of_a_transposed_convolution_is_what_torch_reaches(groups: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randint(-128, 128, (4, 3, 2, 2), generator=generator)
    reach = sum_reach(by_channel(w, "transposed", groups), -10, 245)
    assert reach.high.shape == (3 * groups,)
    inputs = 4 // groups
    for channel in range(3 * groups):
        group, inside = divmod(channel, 3)
        x = torch.zeros(1, 4, 2, 2)
        own = slice(inputs * group, inputs * (group + 1))
        x[0, own] = torch.where(w[own, inside] > 0, 245.0, -10.0).flip(-1, -2)
        out = F.conv_transpose2d(x.double(), w.double(), groups=groups)
        assert int(out[0, channel, 1, 1]) == int(reach.high[channel])


def test_the_columns_of_a_matrix_are_its_output_channels() -> None:
    w = torch.randint(-128, 128, (2, 7, 5))
    assert torch.equal(by_channel(w, "columns")[:, :, 0], torch.cat([w[0].T, w[1].T]))


# -- sums in float32 -------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(inputs=st.integers(1, 900), taps=st.sampled_from([1, 9]), seed=st.integers(0, 2**16))
def test_parts_are_exact_in_float32_and_as_few_as_can_be(inputs: int, taps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.integers(-127, 128, (2, inputs, taps))
    parts = exact_in_float32_parts(torch.tensor(w), -100, 255)

    def heaviest(count: int) -> int:
        spans = list(parts_of(inputs, count))
        assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])]
        assert spans[-1][1] == inputs
        return max(255 * int(np.abs(w[:, a:b]).sum(axis=(1, 2)).max()) for a, b in spans)

    assert heaviest(parts) < FLOAT32_EXACT
    assert parts == 1 or heaviest(parts - 1) >= FLOAT32_EXACT
    x = np.where(w[0] > 0, 255, -100)
    for start, end in parts_of(inputs, parts):
        products = (x[start:end] * w[0, start:end]).ravel()
        shuffled = rng.permutation(products).astype(np.float32)
        assert int(np.add.accumulate(shuffled)[-1]) == int(products.sum())


def test_one_channel_that_is_too_heavy_has_no_parts() -> None:
    assert exact_in_float32_parts(torch.full((1, 2, 600), 127), 0, 255) == 0
    assert exact_in_float32_parts(torch.zeros(3, 0, 1, dtype=torch.int64), 0, 255) == 1


def test_full_range_weights_are_the_case_the_proof_is_for() -> None:
    """A layer quantized the usual way can saturate: its largest weight is 127 by construction."""
    layer = nn.Linear(64, 8)
    scale = layer.weight.detach().abs().amax(dim=1) / 127.5
    levels = quantize(layer.weight.detach(), QParams(scale, torch.zeros(8, dtype=torch.int64)), INT8_WEIGHT)
    assert bool(pair_reach(by_channel(levels), 0, 255).beyond(16).any())
