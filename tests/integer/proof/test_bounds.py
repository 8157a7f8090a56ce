"""The bounds of sums: reached by some input, left by none."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
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
from quantc.spec.numerics import QParams, quantize
from quantc.spec.spec import INT8_WEIGHT

Ints = npt.NDArray[np.int64]
INT16 = (-(2**15), 2**15 - 1)
rows = st.lists(st.integers(-128, 127), min_size=1, max_size=12)


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
@example(-1)
@example(-128)
@example(127)
@example(128)
def test_bits_of_an_integer_are_the_fewest_that_hold_it(value: int) -> None:
    bits = bits_of(value)
    assert _holds(value, value, bits)
    assert bits == 1 or not _holds(value, value, bits - 1)


@pytest.mark.parametrize("length", [66_311, 66_312])
def test_the_32_bits_of_an_accumulator_end_where_they_end(length: int) -> None:
    """255 · 127 · 66 311 is the last multiple below 2^31."""
    reach = sum_reach(torch.full((1, length, 1), 127), 0, 255)
    assert reach.highest == 255 * 127 * length
    assert (reach.bits <= 32) == (255 * 127 * length < 2**31) == (length == 66_311)


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
