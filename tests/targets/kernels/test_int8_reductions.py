"""Sums and means of bytes over whole axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.ir.types import TensorType
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_reductions import SumOver, sum_over
from quantc.targets.kernels.kernel_table import Call, NoKernelError
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
from tests.support.programs import Builder


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


@pytest.mark.parametrize("dims", [[0], [1, 2], [-1], [0, 1, 2]])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.uint8, 0, 255), (torch.int8, -128, 127)])
def test_sums_are_those_of_int64(dims: list[int], keepdim: bool, dtype: torch.dtype, low: int, high: int) -> None:
    x = levels((3, 4, 5), dtype, "any", 0)
    axes = tuple(dims)
    wide = x.numpy().astype(np.int64)
    count = wide.size // wide.sum(axes).size
    sums = (wide - 9).sum(axes, keepdims=keepdim)
    rounded = SumOver(dims, keepdim, 9 * count, 0.25, Ending(torch.ones(1), 3, low, high, dtype))(x)
    # to the nearest level, and to either of two that are equally near
    assert np.abs(rounded.numpy() - np.clip(sums * 0.25 + 3, low, high)).max() <= 0.5
    exact = SumOver(dims, keepdim, 9 * count, 0.25, Ending(torch.ones(1), 0, 0, 0, torch.float32))(x)
    assert np.array_equal(exact.numpy(), sums * 0.25)


def refused(*shape: int, dims: list[int]) -> str:
    build = Builder()
    x = build.graph.placeholder("x")
    x.meta["val"] = TensorType(torch.uint8, shape)
    factor = build.constant("m", number(1.0))
    made = build.call(torch.ops.quantc.sum_over.default, x, 0, dims, False, factor, None, 0, 0, 255, torch.uint8)
    with pytest.raises(NoKernelError) as caught:
        sum_over(Call(build.program(made), made))
    return str(caught.value)


def test_sums_that_leave_32_bits_are_refused() -> None:
    assert "leave an int32" in refused(2**12, 2**11, dims=[0, 1])


def test_no_axes_are_not_taken_for_all() -> None:
    assert refused(3, 4, dims=[]) == "it adds nothing"


def test_an_axis_of_any_length_is_refused() -> None:
    build = Builder()
    x = build.input("x", 3, 4)
    factor = build.constant("m", number(1.0))
    x.meta["val"] = torch.empty(3, 4, dtype=torch.uint8, device="meta")
    made = build.call(torch.ops.quantc.sum_over.default, x, 0, [0], False, factor, None, 0, 0, 255, torch.uint8)
    x.meta["val"] = TensorType(torch.uint8, ("batch", 4))
    with pytest.raises(NoKernelError, match="not known before it runs"):
        sum_over(Call(build.program(made), made))
