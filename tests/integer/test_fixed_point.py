"""Multipliers as mantissa and shift, against Python's fractions and integers."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quantc.integer.fixed_point import mantissa_and_shift
from quantc.spec.aten_arithmetic import rescale

multipliers = st.floats(allow_nan=False, allow_infinity=False)


def one(value: float) -> tuple[int, int]:
    mantissa, shift = mantissa_and_shift(torch.tensor(value, dtype=torch.float64))
    assert mantissa.dtype == shift.dtype == torch.int32
    return int(mantissa), int(shift)


def rounded(product: int, shift: int) -> int:
    """Python rounds fractions half to even."""
    exact = Fraction(product) / Fraction(2) ** shift
    return round(exact)


@settings(max_examples=400)
@given(multipliers)
@example(0.0)
@example(5e-324)
@example(math.nextafter(1.0, 0.0))
@example(-math.nextafter(2.0**40, 0.0))
@example(2.0**31)
@example(1.7976931348623157e308)
def test_the_mantissa_is_off_by_at_most_its_last_half_place(multiplier: float) -> None:
    mantissa, shift = one(multiplier)
    error = abs(Fraction(mantissa) / Fraction(2) ** shift - Fraction(multiplier))
    assert error <= abs(Fraction(multiplier)) / 2**31
    assert abs(mantissa) < 2**31
    assert abs(mantissa) >= 2**30 or multiplier == 0


def test_multipliers_of_channels_have_their_own_shifts() -> None:
    mantissa, shift = mantissa_and_shift(torch.tensor([0.5, -0.75, 3.0, 0.0], dtype=torch.float64))
    assert mantissa.tolist() == [2**30, -3 * 2**29, 3 * 2**29, 0]
    assert [m / 2.0**s for m, s in zip(mantissa.tolist(), shift.tolist(), strict=True)] == [0.5, -0.75, 3.0, 0.0]


@settings(max_examples=300)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=8),
    st.one_of(st.floats(2**-45, 2.0**45), multipliers),
    st.integers(0, 255),
)
def test_results_on_a_grid_are_the_clamped_exact_ones(accumulators: list[int], multiplier: float, zero: int) -> None:
    mantissa, shift = mantissa_and_shift(torch.tensor(multiplier, dtype=torch.float64))
    levels = rescale(torch.tensor(accumulators, dtype=torch.int32), mantissa, shift, zero, 0, 255, torch.uint8)
    exact = [rounded(acc * int(mantissa), int(shift)) for acc in accumulators]
    assert levels.tolist() == [max(0, min(255, level + zero)) for level in exact]


def test_each_channel_is_shifted_by_its_own_places() -> None:
    multipliers = torch.tensor([1e-40, 2.0**-33, 1.0, 2.0**35, 1e30, 0.0, -0.5], dtype=torch.float64)
    mantissa, shift = mantissa_and_shift(multipliers)
    accumulators = torch.tensor([[2**31 - 1] * 7, [-(2**31)] * 7, [3] * 7], dtype=torch.int32)
    levels = rescale(accumulators, mantissa, shift, 0, -128, 127, torch.int8)
    assert levels.tolist() == [
        [0, 0, 127, 127, 127, 0, -128],
        [0, 0, -128, -128, -128, 0, 127],
        [0, 0, 3, 127, 127, 0, -2],
    ]
