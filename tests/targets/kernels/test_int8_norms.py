"""Norms and softmax of bytes, computed in float32 and rounded once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from quantc.integer.grid import Grid
from quantc.integer.ops.integer_norms import eps_of, reciprocal_places
from quantc.integer.ops.softmax import powers_of
from quantc.ir.types import TensorType
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_norms import Normalize, NormKernelRows, RootMeanSquare, Softmax, normalize, softmax
from quantc.targets.kernels.kernel_table import Call, NoKernelError
from tests.support.kernel_calls import (
    FILLS,
    call_of,
    check,
    dtypes,
    grids,
    kernels_of,
    levels,
    number,
    seeds,
    zero_points,
)
from tests.support.programs import Builder


@settings(max_examples=80)
@given(
    kind=st.sampled_from(["layer", "layer of one number", "group", "instance", "instance of one number", "rms"]),
    fill=st.sampled_from(FILLS), dtype=dtypes, zero=zero_points, x_scale=st.floats(1e-3, 1.0), out=grids(), seed=seeds,
    step=st.floats(0.005, 0.1), with_offset=st.booleans(),
)  # fmt: skip
def test_norms(
    kind: str, fill: str, dtype: Any, zero: int, x_scale: float, out: Any, seed: int, step: float, with_offset: bool
) -> None:
    shape = (2, 5, 24) if kind.startswith(("layer", "rms")) else (2, 8, 4, 3)
    length = {"layer": 24, "rms": 24, "group": 48, "instance": 12}[kind.partition(" ")[0]]
    numbers = () if "one number" in kind else (24,) if kind in ("layer", "rms") else (8, 1, 1)
    gamma = (torch.rand(numbers, dtype=torch.float64) + 0.2) / step
    offset = torch.randn(numbers, dtype=torch.float64) / step if with_offset else None
    eps = eps_of(length, 255, 1e-5, x_scale)
    assert eps is not None
    multiplier = gamma * 2.0 ** -reciprocal_places(length)
    x = levels(shape, dtype, fill, seed)
    head = (x, zero, length, kind != "rms", eps.value, eps.places)
    steepest = float(gamma.max()) * x_scale / math.sqrt(1e-5) * 255 * 2.0**-23
    check("normalize", *head, multiplier, offset, None, *out, least=0 if steepest > 0.2 else 1)


def test_norms_of_groups_that_are_nearly_alike() -> None:
    """In any order in memory: where channels lie side by side, torch's own norm is 8 steps off."""
    x = torch.full((2, 8, 4, 3), 186, dtype=torch.uint8)
    x[0, 0, 3, 1] = 187
    eps = eps_of(48, 255, 1e-5, 1.0)
    assert eps is not None
    multiplier = torch.full((8, 1, 1), 19.0).double() * 2.0 ** -reciprocal_places(48)
    check("normalize", x, 0, 48, True, eps.value, eps.places, multiplier, None, None, 0, 0, 255, torch.uint8)


def test_norms_of_rows_that_are_all_alike_are_refused_where_float32_would_not_do() -> None:
    """A scale so large that eps comes to nothing beside it."""
    x = levels((4, 16), torch.uint8, "alike", 0)
    eps = eps_of(16, 255, 1e-5, 100.0)
    assert eps is not None
    multiplier = torch.full((16,), 50.0).double() * 2.0 ** -reciprocal_places(16)
    head = (x, 0, 16, True, eps.value, eps.places)
    assert kernels_of("normalize", *head, multiplier, None, None, 0, 0, 255, torch.uint8)[0] == []


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(3, 7), (2, 4, 9), (1, 3, 5, 33), (1, 1), (2, 300)]), dim=st.integers(0, 3), fill=st.sampled_from(
    FILLS), dtype=dtypes, x_scale=st.floats(1e-4, 60.0), step=st.sampled_from([1 / 256, 1 / 128, 1 / 300, 0.003]),
    seed=seeds,
)  # fmt: skip
def test_softmax(shape: Any, dim: int, fill: str, dtype: Any, x_scale: float, step: float, seed: int) -> None:

    dim %= len(shape)
    grid = Grid(number(x_scale), torch.tensor(0), 0, 255, dtype)
    is_power = math.log2(1 / step).is_integer()
    table = powers_of(grid, shape[dim], 9 if is_power else 0)
    ending = (torch.tensor(round(2 / step)), torch.tensor(1)) if is_power else (number(1 / step), None)
    lowest = torch.iinfo(dtype).min
    check("softmax", levels(shape, dtype, fill, seed), table, dim, *ending, lowest, lowest, lowest + 255, dtype)


# -- the kernels themselves, against torch's norms in float64 --------------------------------------------------------------

REAL = Ending(torch.ones(1), 0, 0, 0, torch.float32)
FACTOR, OFFSET = torch.linspace(0.5, 2.0, 6), torch.linspace(-1.0, 1.0, 6)


@pytest.mark.parametrize("offset", [None, OFFSET], ids=["plain", "offset"])
def test_rows_are_normalized_as_layer_norm_does(offset: Tensor | None) -> None:
    x = levels((2, 5, 6), torch.uint8, "any", 0)
    expected = functional.layer_norm(
        x.double(), (6,), FACTOR.double(), None if offset is None else offset.double(), 1e-3
    )
    found = Normalize(NormKernelRows((6,)), 1e-3, FACTOR, offset, REAL)(x)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_groups_of_channels_are_normalized_as_group_norm_does(groups: int, order: torch.memory_format) -> None:
    x = levels((2, 6, 4, 3), torch.uint8, "nearly", 0)
    expected = functional.group_norm(x.double(), groups, FACTOR.double(), OFFSET.double(), 1e-2)
    kernel = Normalize(NormKernelRows(groups=groups, channels=6), 1e-2, FACTOR, OFFSET, REAL)
    torch.testing.assert_close(kernel(x.contiguous(memory_format=order)), expected.float(), rtol=1e-5, atol=1e-4)


def test_a_root_mean_square_is_about_the_zero_point() -> None:
    x = levels((3, 6), torch.uint8, "any", 1)
    expected = functional.rms_norm(x.double() - 100, (6,), FACTOR.double(), 1e-3) + OFFSET
    found = RootMeanSquare(100, NormKernelRows((6,)), 1e-3, FACTOR, OFFSET, REAL)(x)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_one_number_serves_a_whole_row() -> None:
    x = levels((3, 6), torch.uint8, "any", 2)
    found = Normalize(NormKernelRows((6,)), 1e-3, torch.tensor([3.0]), None, REAL)(x)
    torch.testing.assert_close(found, 3 * functional.layer_norm(x.float(), (6,), eps=1e-3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("x_scale", [1e-3, 0.05, 2.0])
def test_softmax_is_that_of_float64_rounded(dim: int, x_scale: float) -> None:
    x = levels((3, 7, 4), torch.uint8, "any", 3)
    reals = torch.softmax(x.double() * x_scale, dim)
    ending = Ending(torch.ones(1), 0, 0, 255, torch.uint8)
    found = Softmax(x_scale, dim, 1 / 256, ending)(x)
    expected = (reals * 256).round().clamp(0, 255)
    assert float((found - expected).abs().max()) <= 1
    assert float((found != expected).float().mean()) < 0.02


def test_softmax_in_other_formats_than_bytes_is_refused() -> None:
    table = powers_of(Grid(number(0.1), torch.tensor(0), 0, 255, torch.uint8), 6, 0)
    x = levels((2, 6), torch.uint8, "any", 0)
    call, _ = call_of("softmax", x, table, 1, number(256.0), None, 0, 0, 2**15 - 1, torch.int16)
    with pytest.raises(NoKernelError, match=r"not torch\.int16"):
        softmax(call)


@pytest.mark.parametrize(
    ("shape", "length", "reason"),
    [((2, 5, 6), 7, "neither whole axes nor groups"), ((2, 6, 4), 6, "not those of channels")],
)
def test_elements_that_are_neither_axes_nor_groups_are_refused(
    shape: tuple[int, ...], length: int, reason: str
) -> None:
    build = Builder()
    x = build.graph.placeholder("x")
    x.meta["val"] = torch.empty(2, length, dtype=torch.uint8, device="meta")
    factor = build.constant("m", torch.ones((), dtype=torch.float64))
    target = torch.ops.quantc.normalize.default
    made = build.call(target, x, 0, length, True, 1 << 20, 0, factor, None, None, 0, 0, 255, torch.uint8)
    x.meta["val"] = TensorType(torch.uint8, shape)
    with pytest.raises(NoKernelError, match=reason):
        normalize(Call(build.program(made), made))
