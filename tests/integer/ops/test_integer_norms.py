"""Norms on integers, against exact sums in Python's integers and NumPy's float64."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.integer.fixed_point import common_shift
from quantc.integer.ops.integer_norms import (
    eps_of,
    fixed_places,
    integer_root,
    reciprocal_places,
    reciprocal_root,
)
from tests.support.integer_matches import (
    NARROW,
    Array,
    both,
    less,
    some_integers,
)

SEEDS = st.integers(0, 2**32 - 1)

# -- the root ------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.lists(st.integers(2**59, 2**62 - 1), min_size=1, max_size=20))
def test_the_root_is_that_of_python(values: list[int]) -> None:
    assert integer_root(torch.tensor(values)).tolist() == [math.isqrt(value) for value in values]


@settings(max_examples=200)
@given(st.lists(st.integers(2**30 - 2**28, 2**31 - 1), min_size=1, max_size=20), st.sampled_from([-1, 0, 1]))
def test_the_root_next_to_a_square(roots: list[int], more: int) -> None:
    values = [max(root * root + more, 2**59) for root in [*roots, 2**29, 2**30, 2**31 - 1]]
    assert integer_root(torch.tensor(values)).tolist() == [math.isqrt(value) for value in values]


@settings(max_examples=200)
@given(st.integers(1, 2**22), st.floats(0, 10), st.floats(1e-3, 1), st.data())
def test_the_reciprocal_is_rounded_down_once(length: int, eps: float, scale: float, data: st.DataObject) -> None:
    found = eps_of(length, 255, eps, scale)
    if found is None:
        assert length**2 * (255**2 + eps / scale**2) > 2**60
        return
    # where nothing deviates the root is of no use, and only must not be zero
    spreads = data.draw(st.lists(st.integers(1, 100) | st.integers(1, length**2 * 255**2), min_size=1, max_size=5))
    got = reciprocal_root(torch.tensor([*spreads, 0]), found.value, found.places, length).tolist()
    assert 0 <= got.pop() < 2**53
    for spread, reciprocal in zip(spreads, got, strict=True):
        variance = Fraction(spread) + Fraction(found.value, 2**found.places)
        # as many pairs of places as its whole part leaves room for in 61 bits
        pairs = (61 - math.floor(variance).bit_length()) // 2
        root = math.isqrt(math.floor(variance * 4**pairs))
        assert reciprocal == (1 << reciprocal_places(length) + pairs) // root


@settings(max_examples=200)
@given(st.integers(1, 2**24), st.sampled_from([127, 255, 65535]), st.floats(0, 1), st.floats(1e-4, 10))
def test_eps_has_all_the_places_there_is_room_for(length: int, reach: int, eps: float, scale: float) -> None:
    found = eps_of(length, reach, eps, scale)
    real = Fraction(eps) * length**2 / Fraction(scale) ** 2
    if found is None:
        assert length**2 * reach**2 + real > 2**60
        return
    assert 0 <= real - Fraction(found.value, 2**found.places) < Fraction(1, 2**found.places)
    assert found.value < 2**62
    assert found.places == 61 or found.value >= 2**61


# -- the op --------------------------------------------------------------------------------------------------------


def _normalized(rows: Array, eps: float, scale: float, centre: bool) -> tuple[Array, Array]:
    """The normalized numbers of rows of integers, and what they were divided by. Sums are exact, so only root and
    division are rounded."""
    total = rows.sum(axis=1, keepdims=True).astype(object) if centre else np.zeros((len(rows), 1), dtype=object)
    length = rows.shape[1]
    squares = np.array([[sum(int(item) ** 2 for item in row)] for row in rows], dtype=object)
    spread = squares * length - total * total
    variance = spread.astype(np.float64) + eps * length**2 / scale**2
    away = (rows.astype(object) * length - total).astype(np.float64)
    root = np.sqrt(variance)
    return np.divide(away, root, out=np.zeros_like(away), where=away != 0), root


def _adversarial(generator: np.random.Generator, length: int, dtype: torch.dtype) -> Tensor:
    """Random rows; constant ones; an outlier; a step; the least there can be; all at the ends of the range."""
    info = torch.iinfo(dtype)
    rows = some_integers(generator, (7, length), dtype)
    rows[1] = int(generator.integers(info.min, info.max))
    rows[2], rows[2, -1] = info.min, info.max
    rows[3], rows[3, : length // 2] = 3, 4
    rows[4], rows[4, 0] = 10, 11
    rows[5, ::2], rows[5, 1::2] = info.min, info.max
    return rows


def _check(
    x: Tensor, zero_point: int, eps: float, scale: float, gamma: Tensor, beta: Tensor, centre: bool, out: Any
) -> None:
    """Hold the op to its stated deviation, in both forms of its multiplier."""
    length = x.shape[-1]
    info = torch.iinfo(x.dtype)
    exact = eps_of(length, info.max - info.min, eps, scale)
    assert exact is not None
    normal, root = _normalized(less(x, zero_point), eps, scale, centre)
    wanted = normal * gamma.numpy() + beta.numpy()
    head = (x, zero_point, length, centre, exact.value, exact.places)
    found = both("normalize", *head, gamma * 2.0 ** -reciprocal_places(length), beta, None, *out)
    allowed = np.abs(normal * gamma.numpy()) * (2.0**-29 + root * 2.0**-52) + 1e-10
    assert _is_near(found, wanted, allowed, out)
    # in steps so small that the deviation is many of them
    fine = 2.0**20
    scaled = gamma * (fine * 2.0 ** -reciprocal_places(length))
    found = both("normalize", *head, scaled, beta * fine, None, *FINE)
    assert _is_near(found, wanted * fine, allowed * fine, FINE)
    places = fixed_places(length)
    mantissas = common_shift([gamma * 2.0**-places], [2**31], beta)
    assert mantissas is not None
    (mantissa,), offset, shift = mantissas
    found = both("normalize", *head, mantissa, offset, shift, *out)
    # a mantissa is off by half of its last place, as is the offset
    coarse = (np.abs(normal) * 2.0**places + 1) * 2.0 ** (-shift.double().numpy() - 1)
    assert _is_near(found, wanted, allowed + coarse + np.abs(gamma.numpy()) * 2.0**-places, out)


def _is_near(found: Tensor, wanted: Array, allowed: Array, out: tuple[int, int, int, torch.dtype]) -> bool:
    zero_point, qmin, qmax, _ = out
    levels = np.clip(wanted + zero_point, qmin, qmax)
    return bool((np.abs(found.numpy().astype(np.float64) - levels) <= 0.5 + allowed).all())


UINT8 = (100, 0, 255, torch.uint8)
FINE = (0, -(2**31), 2**31 - 1, torch.int32)


@settings(max_examples=150)
@given(
    st.integers(1, 70) | st.sampled_from([256, 768, 1000]),
    st.sampled_from(NARROW),
    st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 1.0]),
    st.floats(1e-3, 0.5),
    st.booleans(),
    SEEDS,
)
def test_a_norm_is_as_near_as_it_says(
    length: int, dtype: torch.dtype, eps: float, scale: float, centre: bool, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    info = torch.iinfo(dtype)
    zero_point = int(generator.integers(info.min, info.max, endpoint=True))
    gamma = torch.from_numpy(generator.normal(0, 40, length))
    beta = torch.from_numpy(generator.normal(0, 20, length))
    _check(_adversarial(generator, length, dtype), zero_point, eps, scale, gamma, beta, centre, UINT8)


@pytest.mark.parametrize("length", [2**14, 2**16 + 1, 100_003])
@pytest.mark.parametrize("centre", [True, False])
def test_a_norm_of_very_long_rows(length: int, centre: bool) -> None:
    generator = np.random.default_rng(length)
    x = _adversarial(generator, length, torch.uint8)
    gamma, beta = (torch.tensor(value, dtype=torch.float64) for value in (37.3, -11.25))
    _check(x, 7, 1e-5, 0.02, gamma, beta, centre, UINT8)


def test_a_row_without_variance_becomes_beta() -> None:
    x = torch.full((2, 5), 9, dtype=torch.int8)
    beta = torch.tensor([-3.0, 0.5, 1.5, 2.5, 300.0], dtype=torch.float64)
    found = both("normalize", x, -4, 5, True, 0, 61, beta, beta, None, 0, -128, 127, torch.int8)
    assert found.tolist() == [[-3, 0, 2, 2, 127]] * 2
