"""Kernels on bytes that are no products, each against the op of the integer form it stands for, on bytes of any kind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import quantc as qc
from quantc.errors import InputError
from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels.int8_elementwise import BYTES, QuantizeKernel
from tests.support.kernel_calls import (
    FILLS,
    FLOAT,
    check,
    dtypes,
    grids,
    kernels_of,
    levels,
    number,
    scales,
    seeds,
    shapes,
    zero_points,
)

# -- element by element ------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(shape=shapes, dtype=dtypes, out=st.one_of(grids(), st.just(FLOAT)), first=scales, second=scales, zeros=st.tuples(
    zero_points, zero_points), sign=st.sampled_from([1.0, -1.0]), seed=seeds, fill=st.sampled_from(FILLS))  # fmt: skip
def test_sums_of_two(
    shape: Any, dtype: Any, out: Any, first: float, second: float, zeros: Any, sign: float, seed: int, fill: str
) -> None:
    x, y = levels(shape, dtype, fill, seed), levels(shape, dtype, "any", seed + 1)
    multipliers = [number(first), number(sign * second)]
    names = check("sum", [x, y], list(zeros), multipliers, None, None, *out)
    assert ("quantized add" in names) == (out[-1] is dtype)


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(2, 33, 4, 5), (3, 5), (2, 4, 1, 3)]),
    kind=st.sampled_from(["number", "channels", "broadcast", "three", "mixed"]),
    out=st.one_of(grids(), st.just(FLOAT)),
    scale=scales,
    zeros=st.tuples(zero_points, zero_points, zero_points),
    seed=seeds,
)
def test_other_sums(shape: Any, kind: str, out: Any, scale: float, zeros: Any, seed: int) -> None:
    x, y = levels(shape, torch.uint8, "any", seed), levels(shape, torch.uint8, "any", seed + 1)
    channels = torch.rand(shape[1], *[1] * (len(shape) - 2), dtype=torch.float64) + 0.1
    column, row = y[..., :1].contiguous(), y[:1].contiguous()
    mixed = levels(shape, torch.int8, "any", seed + 2)
    terms, multipliers, offset = {
        "number": ([x], [number(-scale)], number(7.5)),
        "channels": ([x], [channels * scale], channels * -3),
        "broadcast": ([column, row], [number(scale), number(0.3)], None),
        "three": ([x, column, y], [number(scale), number(0.3), number(1.7)], number(-1.25)),
        "mixed": ([mixed, x], [number(scale), channels if len(shape) > 2 else number(1.0)], None),
    }[kind]
    check("sum", terms, list(zeros[: len(terms)]), multipliers, offset, None, *out)


def test_sums_that_float32_cannot_hold_are_refused() -> None:
    x = levels((4, 4), torch.uint8, "any", 0)
    huge = [number(3e5), number(-3e5)]
    assert kernels_of("sum", [x, x], [0, 1], huge, None, None, 0, 0, 255, torch.uint8)[0] == []
    accumulator = torch.ones(4, 4, dtype=torch.int32)
    args = ([x, accumulator], [0, 0], [number(1), number(1)], None, None, 0, 0, 255, torch.uint8)
    assert kernels_of("sum", *args)[0] == []


@settings(max_examples=60)
@given(
    shape=shapes, kind=st.sampled_from(["alike", "gate", "mixed"]), out=st.one_of(grids(), st.just(FLOAT)), seed=seeds,
    scale=st.floats(1e-5, 1.0), zeros=st.tuples(zero_points, zero_points),
)  # fmt: skip
def test_products_of_elements(shape: Any, kind: str, out: Any, scale: float, zeros: Any, seed: int) -> None:
    x = levels(shape, torch.uint8, "any", seed)
    y = levels(shape, torch.int8 if kind == "mixed" else torch.uint8, "any", seed + 1)
    if kind == "gate" and len(shape) > 2:
        y = y.flatten(2)[:, :, :1].reshape(*shape[:2], *[1] * (len(shape) - 2)).contiguous()
    pair = [x, zeros[0], y, zeros[1]] if seed % 2 else [y, zeros[1], x, zeros[0]]
    check("mul", *pair, number(scale), None, *out)


@settings(max_examples=50)
@given(shape=shapes, dtype=dtypes, out=st.one_of(grids(), st.just(FLOAT)), scale=scales, zero=zero_points, seed=seeds)
def test_other_grids(shape: Any, dtype: Any, out: Any, scale: float, zero: int, seed: int) -> None:
    sign = -1 if seed % 2 else 1
    check("requantize", levels(shape, dtype, "any", seed), zero, number(sign * scale), None, *out)


# -- NaN ---------------------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """A product of what comes in, and one of what is computed of it in float."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x.flatten(1)).sqrt().nan_to_num(0.5))
        return made


def _quantized() -> qc.Program:
    torch.manual_seed(0)
    x = torch.randn(4, 2, 4)
    prepared = qc.prepare(qc.capture(Halves().eval(), (x,)), "x86")
    qc.calibrate(prepared, [(x,)])
    return qc.convert(prepared, reduce_range="weights")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_comes_in_and_is_no_number_is_an_error(value: float) -> None:
    program = _quantized()
    module = qc.lower(program, "x86")
    x = torch.randn(4, 2, 4)
    expected, broken = module(x), x.clone()
    broken[1, 1, 2] = value
    for _ in range(4):  # the last of them from a recording
        assert torch.equal(module(x), expected)
        given = broken.clone()
        for form in (program, module.program, module):
            with pytest.raises(InputError, match=f"input 'x' holds {'NaN' if math.isnan(value) else 'infinity'}"):
                form(given)
    # the graphs themselves follow torch's op, which has level 0 for NaN, silently
    assert bool(program.module(broken).isfinite().all())
    broken[0, 0, 0], broken[0, 0, 1] = math.inf, -math.inf  # their sum is NaN, and none of them is
    with pytest.raises(InputError, match="input 'x' holds"):
        module(broken)
    large = torch.full_like(x, 3e38)  # the sum is infinite, and none of them is
    assert bool(module(large).isfinite().all())


@pytest.mark.parametrize("dtype", BYTES)
def test_what_quantizing_makes_of_what_is_no_number(dtype: torch.dtype) -> None:
    """What the docs say of the three forms."""
    info = torch.iinfo(dtype)
    x = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30, 1.0]).repeat(7)
    grid = (0.1, 3, info.min, info.max, dtype)
    written = decomposed_ops().quantize_per_tensor.default(x, *grid).view(7, 6)
    made = QuantizeKernel(*grid)(x).view(7, 6)
    assert bool((written == written[0]).all())
    assert bool((made == made[0]).all())
    assert written[0].tolist() == [0, info.max, info.min, info.max, info.min, 13]
    assert made[0].tolist() == [info.max, info.max, info.min, info.max, info.min, 13]
