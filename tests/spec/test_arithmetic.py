"""`Arithmetic`: every rounding, in float64 and by shifts, against exact fractions; saturation, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.errors import SpecError
from quantc.spec.arithmetic import EXACT, Arithmetic, Rounding
from quantc.spec.aten_arithmetic import rescale, round_to_grid, rounded, rounding_shift

EXACTLY: dict[Rounding, Callable[[Fraction], int]] = {
    "half-even": round,
    "half-up": lambda x: math.floor(x + Fraction(1, 2)),
    "half-away": lambda x: int(math.copysign(math.floor(abs(x) + Fraction(1, 2)), x)),
    "truncate": math.trunc,
    "floor": math.floor,
}
ROUNDINGS = get_args(Rounding)


def test_every_rounding_is_known_here() -> None:
    assert set(ROUNDINGS) == set(EXACTLY)


@given(st.sampled_from(ROUNDINGS), st.integers(-(2**40), 2**40), st.integers(0, 12))
def test_float64_is_rounded_as_fractions_are(rounding: Rounding, steps: int, places: int) -> None:
    x = Fraction(steps, 2**places)
    found = rounded(torch.tensor([float(x)], dtype=torch.float64), rounding)
    assert int(found) == EXACTLY[rounding](x)


@given(st.sampled_from(ROUNDINGS), st.integers(-300, 300), st.sampled_from([-math.inf, math.inf]))
def test_neighbours_of_halves_are_rounded_as_fractions_are(rounding: Rounding, halves: int, toward: float) -> None:
    x = math.nextafter(halves / 2, toward)
    assert int(rounded(torch.tensor(x, dtype=torch.float64), rounding)) == EXACTLY[rounding](Fraction(x))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("x", [0.49999999999999994, -0.49999999999999994, 4503599627370497.5, -0.0, 2.5, -2.5, 1e300])
def test_floats_that_adding_a_half_would_misround(rounding: Rounding, x: float) -> None:
    assert int(rounded(torch.tensor(x, dtype=torch.float64), rounding)) == EXACTLY[rounding](Fraction(x))


@given(st.sampled_from(ROUNDINGS), st.integers(-(2**61), 2**61), st.integers(0, 80))
def test_shifts_are_rounded_as_fractions_are(rounding: Rounding, product: int, shift: int) -> None:
    found = rounding_shift(torch.tensor([product]), torch.tensor(shift), rounding)
    assert int(found) == EXACTLY[rounding](Fraction(product, 2**shift))


@given(st.sampled_from(ROUNDINGS), st.integers(-(2**20), 2**20), st.integers(1, 8))
def test_negative_shifts_multiply(rounding: Rounding, product: int, shift: int) -> None:
    assert int(rounding_shift(torch.tensor([product]), torch.tensor(-shift), rounding)) == product << shift


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_result_that_does_not_saturate_wraps_around_as_numpy_has_it(rounding: Rounding) -> None:
    acc = torch.arange(-3000, 3000, dtype=torch.int32)
    found = rescale(acc, torch.tensor(0.25, dtype=torch.float64), None, 3, -128, 127, torch.int8, rounding, False)
    exact = np.array([EXACTLY[rounding](Fraction(int(x), 4)) + 3 for x in acc])
    assert np.array_equal(found.numpy(), exact.astype(np.int8))
    by_shift = rescale(acc, torch.tensor(1), torch.tensor(2), 3, -128, 127, torch.int8, rounding, False)
    assert torch.equal(by_shift, found)
    clamped = rescale(acc, torch.tensor(1), torch.tensor(2), 3, 0, 100, torch.int8, rounding, False)
    assert np.array_equal(clamped.numpy(), exact.astype(np.int8).clip(0, 100))


def test_numbers_beyond_every_integer_wrap_to_something_and_saturate_to_the_end() -> None:
    huge = torch.tensor([1e300, -1e300], dtype=torch.float64)
    assert round_to_grid(huge, None, 0, -128, 127, torch.int8).tolist() == [127, -128]
    assert round_to_grid(huge, None, 0, -128, 127, torch.int8, "half-up", False).dtype == torch.int8


def test_the_exact_one_adds_no_arguments() -> None:
    assert EXACT.ending == ()
    assert Arithmetic(rounding="half-up").ending == ("half-up",)
    assert Arithmetic(saturate=False).ending == ("half-even", False)
    assert (Arithmetic(accumulator_bits=24).sum_bits, Arithmetic(accumulator_bits=48).sum_bits) == (24, 32)
    assert (Arithmetic(multiplier="shift").scale_digits, EXACT.scale_digits) == (1, 24)


@pytest.mark.parametrize(
    ("field", "value"),
    [("rounding", "up"), ("multiplier", "float32"), ("accumulator_bits", 4), ("saturate", 1), ("semantics", "place")],
)
def test_what_it_cannot_be_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=field):
        Arithmetic.model_validate({field: value})
