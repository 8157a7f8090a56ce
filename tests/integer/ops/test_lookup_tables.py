"""Lookup tables of functions: an entry for every integer, and a row for each index of an axis."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.integer.ops.lookup_tables import table_of
from tests.support.curves import EIGHT_BITS, ONE, SEEDS, curve, grid, is_rounding_of
from tests.support.integer_matches import NARROW, both, some_integers


@settings(max_examples=80)
@given(st.sampled_from(list(ONE)), st.floats(1e-3, 0.1), st.floats(1e-3, 0.1), EIGHT_BITS, EIGHT_BITS, st.data())
def test_a_table_has_what_the_function_makes_of_every_integer(
    name: str, scale: float, out_scale: float, dtype: torch.dtype, out_dtype: torch.dtype, data: st.DataObject
) -> None:
    x, out = (
        grid(step, data.draw(st.integers(torch.iinfo(kind).min, torch.iinfo(kind).max)), kind)
        for step, kind in ((scale, dtype), (out_scale, out_dtype))
    )
    every = torch.arange(x.qmin, x.qmax + 1).to(dtype)
    found = both("lookup", every, table_of(curve(name), x, out), 0)
    assert found.dtype == out_dtype
    for q, level in zip(every.tolist(), found.tolist(), strict=True):
        assert is_rounding_of(level, ONE[name][1]((q - x.one_zero_point) * x.one_scale), out)


def test_a_table_of_16_bits() -> None:
    x, out = grid(1e-4, 1000, torch.int16), grid(1e-4, -7, torch.int16)
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    found = both("lookup", every, table_of(curve("silu"), x, out), 0)
    real = (np.arange(-(2**15), 2**15) - 1000) * x.one_scale
    exact = real / (1 + np.exp(-real)) / out.one_scale
    assert np.abs(found.numpy() - np.clip(exact - 7, -(2**15), 2**15 - 1)).max() < 0.5 + 1e-9


@settings(max_examples=60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(NARROW), st.data(), SEEDS)
def test_a_lookup_takes_the_entry_of_its_row(
    shape: list[int], dtype: torch.dtype, data: st.DataObject, seed: int
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    shape[axis] = max(shape[axis], 1)
    generator = np.random.default_rng(seed)
    x, least = some_integers(generator, shape, dtype), torch.iinfo(dtype).min
    table = generator.integers(-128, 127, (shape[axis], torch.iinfo(dtype).max - least + 1)).astype(np.int8)
    found = both("lookup", x, torch.from_numpy(table), axis)
    for index in range(shape[axis]):
        wanted = table[index][x.select(axis, index).numpy().astype(np.int64) - least]
        assert np.array_equal(found.select(axis, index).numpy(), wanted)
