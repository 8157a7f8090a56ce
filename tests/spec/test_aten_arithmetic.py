"""Integer arithmetic in ATen primitives: one rounding, half to even, against Python's fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from quantc.spec.aten_arithmetic import LIMIT_PLACES, center, rescale, round_to_grid, rounding_shift

MOST = 2**LIMIT_PLACES


def rounded(product: int, shift: int) -> int:
    """Python rounds fractions half to even."""
    return round(Fraction(product) / Fraction(2) ** shift)


@settings(max_examples=500)
@given(st.integers(-(2**63) + 1, 2**63 - 1), st.integers(-1100, 1200))
@example(2**62, 63)
@example(-(2**62), 63)
@example(2**62 + 1, 63)
@example(2**63 - 1, 64)
@example(3, 1)
@example(-3, 1)
@example(-1, -2000)
@example(0, -5)
@example(12345, 0)
def test_shifting_rounds_half_to_even_for_any_shift(product: int, shift: int) -> None:
    expected = rounded(product, shift)
    if shift < 0:
        expected = max(-MOST, min(MOST, expected))
    assert int(rounding_shift(torch.tensor([product]), torch.tensor([shift], dtype=torch.int32))) == expected


@pytest.mark.parametrize("shift", range(-3, 64))
def test_ties_go_to_the_even_neighbour(shift: int) -> None:
    half = 2 ** (shift - 1) if shift > 0 else 1
    products = [sign * (2 * k + 1) * half for k in range(4) for sign in (1, -1)]
    products = [product for product in products if abs(product) < 2**63]
    found = rounding_shift(torch.tensor(products), torch.tensor(shift, dtype=torch.int32))
    assert found.tolist() == [rounded(product, shift) for product in products]


def test_shifting_is_traced_into_aten_ops_with_the_same_results() -> None:
    product, shift = torch.tensor([[5, -5, 6], [2**62, -7, 9]]), torch.tensor([1, 80, -2], dtype=torch.int32)
    traced = make_fx(lambda x, places: rounding_shift(x, places))(product, shift)  # noqa: PLW0108 - its default is no input
    assert torch.equal(traced(product, shift), torch.tensor([[2, 0, 24], [2**61, 0, 36]]))
    assert torch.equal(torch.compile(traced)(product, shift), rounding_shift(product, shift))


def test_centering_is_done_in_a_dtype_wide_enough() -> None:
    x = torch.tensor([0, 255], dtype=torch.uint8)
    assert center(x, 200).tolist() == [-200, 55]
    assert center(x, torch.tensor([1, 255], dtype=torch.uint8)).tolist() == [-1, 0]
    assert (center(x, 0).dtype, center(x, 0, torch.int16).dtype) == (torch.int32, torch.int16)
    assert center(x, 0).tolist() == [0, 255]


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), st.integers(-20, 20), st.integers(0, 255))
def test_a_multiplier_that_float64_holds_rescales_exactly(accumulators: list[int], power: int, zero: int) -> None:
    multiplier = torch.tensor(2.0**-power, dtype=torch.float64)
    found = rescale(torch.tensor(accumulators, dtype=torch.int32), multiplier, None, zero, 0, 255, torch.uint8)
    assert found.tolist() == [max(0, min(255, rounded(value, power) + zero)) for value in accumulators]


def test_a_mantissa_and_a_shift_rescale_in_integers() -> None:
    accumulators = torch.tensor([5, -5, 6, 2**31 - 1], dtype=torch.int32)
    mantissa, shift = torch.tensor(3, dtype=torch.int32), torch.tensor(1, dtype=torch.int32)
    found = rescale(accumulators, mantissa, shift, 10, -128, 127, torch.int8)
    assert found.tolist() == [18, 2, 19, 127], "15/2 and -15/2 are ties: 8 and -8"


def test_a_real_result_is_rounded_to_float32_and_has_no_grid() -> None:
    total = torch.tensor([0.1, -1e9], dtype=torch.float64)
    found = round_to_grid(total, None, 3, 0, 255, torch.float32)
    assert found.dtype is torch.float32
    assert torch.equal(found, torch.tensor([0.1, -1e9]))


def test_the_zero_point_is_added_after_rounding_and_before_clamping() -> None:
    total = torch.tensor([0.5, 1.5, -200.0, 300.0], dtype=torch.float64)
    assert round_to_grid(total, None, 1, -5, 127, torch.int8).tolist() == [1, 3, -5, 127]
