"""Pairs of neighbours: what their sums can come to, and the least scales with which they fit; kernels do not saturate."""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.integer.proof.bounds import decisive, pair_reach
from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.proof.weight_fitting import PairFit
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.instruction_sets import INSTRUCTION_SETS, PairSums
from quantc.spec.numerics import QParams, quantize
from quantc.spec.spec import INT8_NARROW_WEIGHT
from quantc.targets.kernels.saturation import adds_in_16_bits
from tests.support.sums_of_pairs import MADDUBS, pairs_fit

INT16 = (-(2**15), 2**15 - 1)


def maddubs() -> PairSums:
    found = INSTRUCTION_SETS["avx2"].pairs
    assert found is not None
    return found


def brute(channel: npt.NDArray[np.int64], qmax: int) -> tuple[int, int]:
    """The smallest and the largest sum of neighbours `[input channel, tap]`, by going through them one by one."""
    inputs, taps = channel.shape
    pairs = [(channel[i, t], channel[i + 1, t]) for i in range(0, inputs - 1, 2) for t in range(taps)]
    if inputs % 2:
        row = channel.T.ravel()
        pairs += [pair for index, pair in enumerate(pairwise(row.tolist())) if index % 2 == 0]
    sums = [0, *(qmax * sum(w for w in pair if w > 0) for pair in pairs)]
    below = [0, *(qmax * sum(w for w in pair if w < 0) for pair in pairs)]
    return int(min(below)), int(max(sums))


weights = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**16))


@settings(max_examples=200)
@given(shape=weights, qmax=st.integers(1, 255))
def test_neighbours_reach_as_far_as_going_through_them_says(shape: tuple[int, int, int, int], qmax: int) -> None:
    outputs, inputs, taps, seed = shape
    levels = np.random.default_rng(seed).integers(-128, 128, (outputs, inputs, taps))
    if inputs * taps == 1:
        return  # no pair, and one product always fits
    reach = pair_reach(decisive(torch.tensor(levels, dtype=torch.int8), "adjacent"), 0, qmax)
    expected = [brute(channel, qmax) for channel in levels]
    assert list(zip(reach.low.tolist(), reach.high.tolist(), strict=True)) == expected


@settings(max_examples=100)
@given(shape=weights, qmax=st.sampled_from([255, 200]))
def test_scales_are_the_smallest_with_which_neighbours_fit(shape: tuple[int, int, int, int], qmax: int) -> None:
    outputs, inputs, taps, seed = shape
    weight = torch.from_numpy(np.random.default_rng(seed).normal(size=(outputs, inputs, taps)).astype(np.float32))
    spec = INT8_NARROW_WEIGHT.but(granularity=PerChannel(axis=0))
    scale = weight.abs().amax(dim=(1, 2)) / 127
    fitted = PairFit(weight, spec, Levels(0, qmax, torch.uint8), maddubs()).least(scale)

    def fits(scales: Tensor) -> list[bool]:
        levels = quantize(weight, QParams(scales, torch.zeros_like(scales, dtype=torch.int64)), spec).numpy()
        reaches = [brute(channel.astype(np.int64), qmax) for channel in levels]
        return [low >= INT16[0] and high <= INT16[1] for low, high in reaches]

    assert all(fits(fitted))
    raised = fitted > scale
    below = fits(torch.where(raised, torch.nextafter(fitted, torch.zeros_like(fitted)), scale))
    assert not any(ok for ok, up in zip(below, raised.tolist(), strict=True) if up)
    assert fits(scale) == [not up for up in raised.tolist()]


MODELS: dict[str, tuple[nn.Linear | nn.Conv2d, tuple[int, ...]]] = {
    "linear": (nn.Linear(37, 48), (5, 37)),
    "conv": (nn.Conv2d(16, 24, 3), (1, 16, 9, 9)),
    "odd channels": (nn.Conv2d(5, 24, 3), (1, 5, 9, 9)),
    "stem": (nn.Conv2d(3, 24, 7, 2), (1, 3, 21, 21)),
    "depthwise": (nn.Conv2d(16, 16, 3, groups=16), (1, 16, 9, 9)),
    "grouped": (nn.Conv2d(16, 16, 3, groups=4), (1, 16, 9, 9)),
}


@pytest.mark.skipif(not adds_in_16_bits(), reason="this processor adds products of bytes in 32 bits at once")
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_exact_where_every_sum_is_as_large_as_it_can_be(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = MODELS[name]
    model = nn.Sequential(layer, nn.ReLU()).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.randn_like(layer.weight).abs() * 0.1)  # of one sign: all sums add up
    x = torch.rand(shape)
    x.view(-1)[0] = 1.0
    prepared = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(prepared, [(x,)])
    largest = torch.full(shape, 100.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing can saturate, and nothing is said
        lowered = qc.lower(qc.convert(prepared), "x86")
    assert torch.allclose(lowered(largest), qc.convert(prepared, "integer")(largest), rtol=1e-5)
    if layer.weight.dim() == 2:  # the check can fail: without room this processor cuts sums off
        with pytest.warns(UserWarning, match="saturate"):
            careless = qc.lower(qc.convert(prepared, reduce_range="no"), "x86")
        exact = qc.convert(prepared, "integer", reduce_range="no")(largest)
        assert not torch.allclose(careless(largest), exact, rtol=0.01)


def test_weights_lose_less_than_a_bit() -> None:
    """Any two weights of a channel would need scales nearly twice as large."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64, 9)
    spec = INT8_NARROW_WEIGHT.but(granularity=PerChannel(axis=0))
    scale = weight.abs().amax(dim=(1, 2)) / 127
    fitted = PairFit(weight, spec, Levels(0, 255, torch.uint8), maddubs()).least(scale)
    assert 1.2 < float((fitted / scale).mean()) < 1.6


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
