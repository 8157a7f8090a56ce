"""Sums of integers over axes, windows and spans, against NumPy's int64 and float64, place by place."""

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

from quantc.integer.fixed_point import mantissa_and_shift
from quantc.integer.library import OPS
from tests.support.integer_matches import NARROW, Array, both, less, onto_grid, same, some_integers, some_multiplier
from tests.support.integer_oracle_sums import Window, sum_windows

SEEDS = st.integers(0, 2**32 - 1)
GRID = (11, 0, 255, torch.uint8)

# -- the ops -------------------------------------------------------------------------------------------------------


def check(name: str, head: tuple[Any, ...], acc: Array, multiplier: Tensor) -> None:
    """An op that rescales an exact sum, rounded onto a grid and to float32."""
    steps = np.asarray(acc, dtype=np.float64) * multiplier.numpy()
    assert same(both(name, *head, multiplier, None, *GRID), onto_grid(steps, *GRID))
    found = both(name, *head, multiplier, None, 0, 0, 0, torch.float32)
    assert same(found, torch.from_numpy(np.asarray(steps.astype(np.float32))))


def drawn(seed: int, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, int, Tensor]:
    """Integers, their zero point and a multiplier."""
    generator = np.random.default_rng(seed)
    info = torch.iinfo(dtype)
    zero_point = int(generator.integers(info.min, info.max, endpoint=True))
    return some_integers(generator, shape, dtype), zero_point, some_multiplier(generator) * 4 / (info.max - info.min)


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.data(),
    SEEDS,
    st.sampled_from(NARROW),
    st.booleans(),
)
def test_sums_over_axes(shape: list[int], data: st.DataObject, seed: int, dtype: torch.dtype, keepdim: bool) -> None:
    dims = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))) if shape else []
    x, zero_point, multiplier = drawn(seed, shape, dtype)
    acc = less(x, zero_point).sum(axis=tuple(dims), keepdims=keepdim) if dims else less(x, zero_point)
    check("sum_over", (x, zero_point, dims, keepdim), acc, multiplier)


sliding = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.integers(-1, 2), st.integers(-1, 2)).map(
        lambda row: (max(row[0], row[1] - row[3] - row[4]), *row[1:])
    ),
    min_size=1,
    max_size=3,
)
"""For each axis: size, kernel, stride, places before and after."""


@settings(max_examples=80)
@given(sliding, st.lists(st.integers(1, 3), max_size=2), SEEDS, st.sampled_from(NARROW))
def test_sums_over_windows(rows: list[Any], leading: list[int], seed: int, dtype: torch.dtype) -> None:
    x, zero_point, multiplier = drawn(seed, [*leading, *(row[0] for row in rows)], dtype)
    windows: list[list[Window]] = []
    for size, width, step, first, last in rows:
        starts = range(-first, size + last - width + 1, step)
        # what lies outside of the tensor is cut off: it adds nothing, or is not there
        ends = [(max(start, 0, -first), min(start + width, size)) for start in starts]
        windows.append([(start, max(end, start), 1) for start, end in ends])
    acc, _ = sum_windows(less(x, zero_point), windows)
    edges = [edge for row in rows for edge in row[3:]]
    kernel, stride = [row[1] for row in rows], [row[2] for row in rows]
    check("sum_windows", (x, zero_point, kernel, stride, edges), acc, multiplier)


@settings(max_examples=80)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), max_size=2),
    SEEDS,
    st.sampled_from(NARROW),
)
def test_sums_over_spans(axes: list[list[tuple[int, int]]], leading: list[int], seed: int, dtype: torch.dtype) -> None:
    x, zero_point, _ = drawn(seed, [*leading, *[5] * len(axes)], dtype)
    spans = [[(min(pair), max(pair)) for pair in axis] for axis in axes]
    acc, _ = sum_windows(less(x, zero_point), [[(*span, 1) for span in axis] for axis in spans])
    starts = [torch.tensor([start for start, _ in axis]) for axis in spans]
    ends = [torch.tensor([end for _, end in axis]) for axis in spans]
    multiplier = some_multiplier(np.random.default_rng(seed), [len(axis) for axis in axes]) / 300
    check("sum_spans", (x, zero_point, starts, ends), acc, multiplier)


def test_averages_in_fixed_form_are_those_of_python_integers() -> None:
    """With a multiplier for each place."""
    x, zero_point, _ = drawn(5, (2, 3, 9), torch.uint8)
    counts = torch.tensor([2, 3, 3, 3, 1])
    mantissa, shift = mantissa_and_shift(1.7 / counts.double())
    found = both("sum_windows", x, zero_point, [3], [2], [1, 1], mantissa, shift, *GRID)
    padded = np.pad(less(x, zero_point), [(0, 0), (0, 0), (1, 1)])
    for place in np.ndindex(2, 3, 5):
        acc = int(padded[(*place[:2], slice(2 * place[2], 2 * place[2] + 3))].sum())
        exact = Fraction(acc * int(mantissa[place[2]]), 2 ** int(shift[place[2]]))
        assert int(found[place]) == min(max(round(exact) + 11, 0), 255)


IMAGE = torch.arange(24, dtype=torch.uint8).reshape(1, 2, 3, 4)
REAL = torch.tensor(0.3, dtype=torch.float64)
ENDS = [torch.tensor([0, 1]), torch.tensor([2, 4])]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("sum_over", (IMAGE, 3, [2, 3], True, REAL, None, *GRID)),
        ("sum_windows", (IMAGE, 3, [2, 2], [1, 2], [1, 0, 0, 1], REAL, None, *GRID)),
        ("sum_spans", (IMAGE, 3, ENDS[:1], ENDS[1:], REAL, None, *GRID)),
    ],
)
def test_torch_accepts_the_ops(name: str, args: tuple[Any, ...]) -> None:
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(OPS[name].target, args, test_utils=kinds)
