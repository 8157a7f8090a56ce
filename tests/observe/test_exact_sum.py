"""Exact sums against fractions, and the fixed point they are made of."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.observe.exact_sum import BITS, ExactSum, exponents_of, fixed_point, power
from tests.support.laws import law

NUMBERS = st.floats(-(2.0**200), 2.0**200, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 2.0**-250)


@law(100)
@given(st.lists(NUMBERS, min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_sums_are_off_by_little_and_do_not_depend_on_the_order(numbers: list[float], rng: object) -> None:
    total = ExactSum.zeros(1, 1)
    for number in numbers:
        total = total.added(torch.full((1, 1), number, dtype=torch.float64))
    exact = sum(map(Fraction, numbers))
    assert abs(Fraction(float(total.value())) - exact) <= Fraction(max(map(abs, numbers))) * len(numbers) / 2**23
    rng.shuffle(numbers)  # type: ignore[attr-defined]
    again = ExactSum.zeros(1, 1)
    for number in numbers:
        again = again.added(torch.full((1, 1), number, dtype=torch.float64))
    assert (again.upper, again.lower, again.exponents) == (total.upper, total.lower, total.exponents)


@law(60)
@given(st.integers(-1022, 1023))
def test_powers_are_exact(exponent: int) -> None:
    assert float(power(torch.tensor([exponent]))) == 2.0**exponent


def test_fixed_point_rounds_to_the_bits_of_the_largest() -> None:
    rows = torch.tensor([[[1.0, 1e-45, 0.0, -3e38], [0.3, 0.0, 0.0, 1e30]]])
    integers, exponents = fixed_point(rows)
    assert bool((integers.abs() <= 2**BITS).all())
    assert torch.equal(integers, integers.round())
    error = (integers * power(exponents).unsqueeze(1) - rows.double()).abs()
    assert bool((error <= rows.double().abs().amax(1, keepdim=True) * 2.0**-BITS).all())


def test_exponents_are_the_smallest_above() -> None:
    assert exponents_of(torch.tensor([1.0, 0.99, 2.0, -4.0])).tolist() == [1, 0, 2, 3]
