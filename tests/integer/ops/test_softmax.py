"""Softmax on integers, against Python's fractions and decimals."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import quantc as qc
from quantc.integer.fixed_point import mantissa_and_shift
from quantc.integer.ops.softmax import powers_of
from tests.support.curves import SEEDS, Of, grid
from tests.support.integer_matches import NARROW, both, calibrated, integer_ops, some_integers


def _exact_softmax(row: list[int], scale: float) -> list[Decimal]:
    """Of integers on a scale, to 40 digits."""
    with localcontext() as context:
        context.prec = 40
        powers = [(Decimal(scale) * (q - max(row))).exp() for q in row]
        return [power / sum(powers) for power in powers]


def _inverse(scale: float, form: str) -> tuple[Tensor, Tensor | None, int]:
    """`1 / scale` as the op takes it."""
    if form == "power of two":
        exponent = round(-math.log2(scale))
        return torch.tensor(2 ** (exponent + 1)), torch.tensor(1), exponent + 1
    if form == "float64":
        return torch.tensor(1 / scale, dtype=torch.float64), None, 0
    return *mantissa_and_shift(torch.tensor(1 / scale, dtype=torch.float64)), 31


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.sampled_from([(2.0**-8, "power of two"), (2.0**-7, "power of two"), (1 / 255, "float64"), (1 / 255, "fixed")]),
    st.floats(1e-3, 0.5),
    st.sampled_from(NARROW),
    st.data(),
)
def test_softmax_is_as_near_as_it_says(
    shape: list[int], out: tuple[float, str], scale: float, dtype: torch.dtype, data: st.DataObject
) -> None:
    dim, generator = data.draw(st.integers(-len(shape), len(shape) - 1)), np.random.default_rng(data.draw(SEEDS))
    shape[dim] = data.draw(st.sampled_from([1, 2, 3, 7, 40]))
    x = some_integers(generator, shape, dtype)
    source, zero_point = grid(scale, 3, dtype), data.draw(st.integers(0, 20))
    multiplier, shift, bits = _inverse(*out)
    powers = powers_of(source, shape[dim], bits)
    places = round(math.log2(int(powers[0])))
    found = both("softmax", x, powers, dim, multiplier, shift, zero_point, 0, 255, torch.uint8)
    deviation = (shape[dim] + 1) * 2.0**-places / out[0] + (2.0**-24 if out[1] == "fixed" else 1e-12)
    rows, levels = (item.movedim(dim, -1).reshape(-1, shape[dim]).tolist() for item in (x, found))
    for row, got in zip(rows, levels, strict=True):
        for real, level in zip(_exact_softmax(row, source.one_scale), got, strict=True):
            steps = float(real / Decimal(out[0])) + zero_point
            assert abs(min(max(steps, 0), 255) - level) <= 0.5 + deviation


@pytest.mark.parametrize("length", [1, 2, 3, 100, 511, 512, 513, 1024, 5000])
def test_equal_elements_share_evenly_and_ties_go_to_even(length: int) -> None:
    x = torch.full((2, length), 77, dtype=torch.uint8)
    multiplier, shift, bits = _inverse(2.0**-8, "power of two")
    found = both("softmax", x, powers_of(grid(0.1), length, bits), 1, multiplier, shift, 0, 0, 255, torch.uint8)
    assert set(found.reshape(-1).tolist()) == {min(round(Fraction(256, length)), 255)}


def test_a_quotient_next_to_a_half_is_rounded_as_python_does() -> None:
    """Two powers with a quotient nearer to a half than float64 can tell."""
    x = torch.tensor([1, 0], dtype=torch.uint8)
    for level in range(127):
        for more in (-1, 0, 1):
            half = Fraction(2 * level + 1, 2)
            power = round(half * 2**52 / (256 - half)) + more
            table = torch.tensor([2**52, power])
            found = both("softmax", x, table, 0, torch.tensor(512), torch.tensor(1), 0, 0, 255, torch.uint8)
            total = 2**52 + power
            assert found.tolist() == [min(round(Fraction(256 * item, total)), 255) for item in (2**52, power)]


def test_the_powers_leave_room_for_their_sum() -> None:
    for length in (1, 2, 1000, 2**16, 2**30, None):
        powers = powers_of(grid(0.01), length, 9)
        assert int(powers[0]) * (length or 2**22) <= 2**62
        assert int(powers[0]) * 2**9 <= 2**62
        assert bool((powers.diff() <= 0).all())


def test_softmax_over_an_axis_of_any_length() -> None:
    model = Of(lambda x: torch.softmax(x, 1)).eval()
    sizes = torch.export.Dim("length", min=2, max=4096)
    generator = torch.Generator().manual_seed(0)
    x, longer = (torch.randn(2, size, generator=generator) * 2 for size in (16, 100))
    prepared = calibrated(qc.capture(model, (x,), dynamic_shapes=({1: sizes},)), "qnnpack", [x])
    converted, lowered = qc.convert(prepared), qc.convert(prepared, to="integer")
    assert len(integer_ops(lowered)) == 1
    assert float((lowered(longer) - converted(longer)).abs().max()) <= 1.001 / 256
