"""Sums and means of bytes over whole axes."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernel_calls import (
    FILLS,
    FLOAT,
    check,
    dtypes,
    grids,
    levels,
    number,
    scales,
    seeds,
    shapes,
    zero_points,
)


@settings(max_examples=50)
@given(shape=shapes, keepdim=st.booleans(), out=st.one_of(grids(), st.just(FLOAT)), dtype=dtypes, zero=zero_points,
       scale=scales, picked=st.sets(st.integers(0, 4), min_size=1), seed=seeds, fill=st.sampled_from(FILLS))  # fmt: skip
def test_sums_over_axes(
    shape: Any, keepdim: bool, out: Any, dtype: Any, zero: int, scale: float, picked: Any, seed: int, fill: str
) -> None:
    shape = tuple(max(size, 1) for size in shape)
    dims = sorted({dim % len(shape) for dim in picked})
    count = math.prod(shape[dim] for dim in dims)
    x = levels(shape, dtype, fill, seed)
    check("sum_over", x, zero, dims, keepdim, number(scale / count), None, *out)
