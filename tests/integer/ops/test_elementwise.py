"""Sums and products of elements on integers, against NumPy's int64 and float64 and Python's fractions."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.integer.fixed_point import common_shift
from quantc.integer.library import OPS
from tests.support.integer_matches import NARROW, Array, both, less, onto_grid, same, some_integers, some_multiplier

SEEDS = st.integers(0, 2**32 - 1)


def reals(values: Sequence[Any]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@st.composite
def broadcast_shapes(draw: st.DrawFn, count: int) -> list[tuple[int, ...]]:
    """Shapes that can be broadcast to one another; the first is the whole."""
    whole = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    shapes = [whole]
    for _ in range(count - 1):
        kept = whole[draw(st.integers(0, len(whole))) :]
        shapes.append(tuple(size if draw(st.booleans()) else 1 for size in kept))
    return shapes


Sum = tuple[list[Tensor], list[int], list[Tensor], Tensor | None]


@st.composite
def sums(draw: st.DrawFn) -> Sum:
    """Terms of one to three dtypes, int32 accumulators with a multiplier for each channel among them."""
    shapes = draw(broadcast_shapes(draw(st.integers(1, 3))))
    generator = np.random.default_rng(draw(SEEDS))
    xs, zero_points, multipliers = [], [], []
    for shape in draw(st.permutations(shapes)):
        dtype = draw(st.sampled_from((*NARROW, torch.int32)))
        info = torch.iinfo(dtype)
        xs.append(some_integers(generator, shape, dtype))
        zero_points.append(0 if dtype == torch.int32 else draw(st.integers(info.min, info.max)))
        channels = shape[-1:] if draw(st.booleans()) else ()
        multipliers.append(some_multiplier(generator, channels) / (2**24 if dtype == torch.int32 else 1))
    offset = some_multiplier(generator) * 20 if draw(st.booleans()) else None
    return xs, zero_points, multipliers, offset


def total_of(xs: Sequence[Tensor], zero_points: Sequence[int], multipliers: Sequence[Tensor], offset: Any) -> Array:
    """The sum in float64, its terms added in their order."""
    total: Array = None
    for x, zero_point, multiplier in zip(xs, zero_points, multipliers, strict=True):
        scaled = less(x, zero_point).astype(np.float64) * multiplier.numpy()
        total = scaled if total is None else total + scaled
    return total if offset is None else total + offset.numpy()


# -- the ops -------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(sums(), st.sampled_from([(0, 255, torch.uint8), (-128, 127, torch.int8), (-(2**15), 2**15 - 1, torch.int16)]))
def test_a_sum_is_rounded_once(terms: Sum, grid: tuple[int, int, torch.dtype]) -> None:
    found = both("sum", *terms, None, 3, *grid)
    assert same(found, onto_grid(total_of(*terms), 3, *grid))


@settings(max_examples=60)
@given(sums())
def test_a_sum_that_is_read_in_float_is_rounded_to_float32(terms: Sum) -> None:
    found = both("sum", *terms, None, 0, 0, 0, torch.float32)
    assert same(found, torch.from_numpy(np.asarray(total_of(*terms)).astype(np.float32)))


def test_a_sum_does_not_change_what_it_reads() -> None:
    xs = [torch.arange(6, dtype=torch.uint8), torch.arange(6, dtype=torch.uint8)]
    multipliers, offset = reals([0.5, 0.25]), torch.zeros(6, dtype=torch.float64)
    OPS["sum"].target(xs, [1, 2], multipliers, offset, None, 0, 0, 255, torch.uint8)
    assert all(x.tolist() == [0, 1, 2, 3, 4, 5] for x in xs)
    assert [float(item) for item in multipliers] == [0.5, 0.25]
    assert not offset.any()


def most(dtype: torch.dtype, zero_point: int) -> int:
    info = torch.iinfo(dtype)
    return max(info.max - zero_point, zero_point - info.min)


@settings(max_examples=100)
@given(sums())
def test_sums_in_fixed_form_are_those_of_python_integers(terms: Sum) -> None:
    xs, zero_points, multipliers, offset = terms
    found = common_shift(multipliers, [most(x.dtype, z) for x, z in zip(xs, zero_points, strict=True)], offset)
    assert found is not None
    mantissas, constant, shift = found
    out = both("sum", xs, zero_points, mantissas, constant, shift, 5, -128, 127, torch.int8)
    whole = np.zeros(out.shape, dtype=object)
    for x, zero_point, mantissa in zip(xs, zero_points, mantissas, strict=True):
        whole = whole + less(x, zero_point).astype(object) * mantissa.numpy().astype(object)
    if constant is not None:
        whole = whole + constant.numpy().astype(object)
    places = np.broadcast_to(shift.numpy(), out.shape).ravel()
    levels = [
        min(max(round(Fraction(int(item), 2 ** int(place))) + 5, -128), 127)
        for item, place in zip(np.asarray(whole).ravel(), places, strict=True)
    ]
    assert out.flatten().tolist() == levels


# -- one shift for all ---------------------------------------------------------------------------------------------

finite = st.floats(1e-12, 2.0**20) | st.sampled_from([2.0**power for power in range(-40, 20)])
signed = st.builds(lambda size, negative: -size if negative else size, finite, st.booleans())


def tables(channels: int) -> st.SearchStrategy[list[tuple[list[float], int]]]:
    """Terms with a multiplier for each channel, or with one for all."""
    row = st.lists(signed, min_size=channels, max_size=channels) | st.lists(signed, min_size=1, max_size=1)
    return st.lists(st.tuples(row, st.integers(1, 2**32)), min_size=1, max_size=4)


@settings(max_examples=200)
@given(st.integers(1, 3).flatmap(tables), st.none() | signed)
def test_no_sum_overflows_with_its_shift_and_one_more_place_would_be_one_too_many(
    rows: list[tuple[list[float], int]], number: float | None
) -> None:
    multipliers, largest = reals([row for row, _ in rows]), [bound for _, bound in rows]
    found = common_shift(multipliers, largest, None if number is None else reals([number])[0])
    assert found is not None
    mantissas, offset, shift = found
    channels = max(len(row) for row, _ in rows)
    shifts = shift.expand(channels).tolist()
    for channel, places in enumerate(shifts):
        values = [Fraction(row[channel if len(row) > 1 else 0]) for row, _ in rows]
        held = [int(item.expand(channels)[channel]) for item in mantissas]
        assert held == [round(value * 2**places) for value in values]
        assert offset is None or int(offset.expand(channels)[channel]) == round(Fraction(number or 0) * 2**places)
        reached = sum(abs(value) * most for value, most in zip(values, largest, strict=True)) + abs(
            Fraction(number or 0)
        )
        assert 1 <= places <= 62
        total = sum(abs(size) * most for size, most in zip(held, largest, strict=True))
        assert total + (0 if offset is None else abs(int(offset.expand(channels)[channel]))) < 2**62
        assert places == 62 or reached * 2**places >= 2**60 * (1 - Fraction(1, 2**40))
    assert (offset is None) == (number is None)


def test_a_channel_with_a_tiny_multiplier_keeps_its_places() -> None:
    """As that of a channel whose weights are all zero, where the bias alone makes an accumulator of 30 bits."""
    multipliers = [torch.tensor([1e-9, 2e-3], dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)]
    found = common_shift(multipliers, [2**30, 255])
    assert found is not None
    mantissa, shift = found[0][0], found[2]
    real = mantissa.double() * torch.exp2(-shift.double())
    assert float(((real - multipliers[0]) / multipliers[0]).abs().max()) < 2.0**-20


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_full_accumulators_do_not_overflow(sign: int) -> None:
    """Each product alone could fill an int64: together they still must not leave it."""
    worst = torch.tensor([-(2**31)], dtype=torch.int32)
    multipliers = reals([sign * (2.0**-31 - 2.0**-55)] * 4)
    found = common_shift(multipliers, [2**31] * 4)
    assert found is not None
    out = both("sum", [worst] * 4, [0] * 4, found[0], None, found[2], 0, -128, 127, torch.int8)
    assert out.tolist() == [-4 * sign]


@pytest.mark.parametrize(("multiplier", "offset"), [(2.0**54, 0.0), (1.0, 2.0**61)])
def test_what_no_mantissa_holds_has_no_shift(multiplier: float, offset: float) -> None:
    assert common_shift(reals([multiplier]), [255], reals([offset])[0]) is None


def test_zeros_and_nothing_have_a_shift() -> None:
    found = common_shift([torch.zeros(2, dtype=torch.float64), torch.zeros((), dtype=torch.float64)], [255, 255])
    assert found is not None
    assert [item.tolist() for item in found[0]] == [[0, 0], [0, 0]]
    empty = common_shift([torch.zeros(0, dtype=torch.float64)], [255])
    assert empty is not None
    assert empty[0][0].tolist() == []


# -- products and single terms -------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(broadcast_shapes(2), SEEDS, st.sampled_from(NARROW), st.sampled_from(NARROW), st.booleans(), st.booleans())
def test_a_product_is_exact_before_it_is_rounded(
    shapes: list[tuple[int, ...]], seed: int, left: torch.dtype, right: torch.dtype, swapped: bool, to_float: bool
) -> None:
    generator = np.random.default_rng(seed)
    first, second = reversed(shapes) if swapped else shapes
    x, y = some_integers(generator, first, left), some_integers(generator, second, right)
    zeros = [int(generator.integers(torch.iinfo(kind).min, torch.iinfo(kind).max)) for kind in (left, right)]
    multiplier = some_multiplier(generator) / (torch.iinfo(left).max * torch.iinfo(right).max) * 2000
    steps = (less(x, zeros[0]) * less(y, zeros[1])).astype(np.float64) * float(multiplier)
    head = (x, zeros[0], y, zeros[1], multiplier, None)
    if to_float:
        found = both("mul", *head, 0, 0, 0, torch.float32)
        assert same(found, torch.from_numpy(np.asarray(steps.astype(np.float32))))
    else:
        assert same(both("mul", *head, 9, 0, 255, torch.uint8), onto_grid(steps, 9, 0, 255, torch.uint8))


U8, I8 = torch.tensor([[3, 250], [0, 9]], dtype=torch.uint8), torch.tensor([-4, 100], dtype=torch.int8)
OUT = (7, 0, 255, torch.uint8)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("sum", ([U8, I8], [3, -1], reals([0.3, -2.0]), reals([1.5])[0], None, *OUT)),
        ("mul", (U8, 3, I8, 5, reals([0.01])[0], None, *OUT)),
        ("requantize", (U8, 3, reals([0.4])[0], None, *OUT)),
    ],
)
def test_torch_accepts_the_ops(name: str, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(
        OPS[name].target, args, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static")
    )
