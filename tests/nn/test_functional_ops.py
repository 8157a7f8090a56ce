"""Functions of quantized tensors, on bytes or in float between two roundings, beside torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from quantc.errors import DataError, MixedTensorsError
from quantc.nn import quantize_per_tensor
from quantc.nn.functional_ops import (
    bytewise,
    cat_on_grid,
    clamp_levels,
    clamp_levels_,
    fixed_grid,
    in_float,
    max_pool2d,
    plus_scalar,
    pointwise,
    requantize,
    times_scalar,
)
from tests.support.nn_cases import both, steps_apart

EVERY_LEVEL = torch.arange(256).float()
FUNCTIONS = (
    *(functional.celu, functional.elu, functional.hardsigmoid, functional.hardswish, functional.leaky_relu),
    *(functional.gelu, functional.silu, torch.sigmoid, torch.tanh),
)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_a_function_of_one_number_is_torchs_of_every_level(function: Any, dtype: torch.dtype) -> None:
    zero = 100 if dtype is torch.uint8 else -28
    x = quantize_per_tensor((EVERY_LEVEL - 100) * 0.05, 0.05, zero, dtype)
    made = pointwise(function, x, grid=(0.02, 5))
    assert made.equals(quantize_per_tensor(function(x.dequantize()), 0.02, 5, dtype))


def test_results_of_a_known_range_have_the_grid_that_torch_gives_them() -> None:
    ours, theirs = both(torch.linspace(-4, 4, 50))
    for function in (torch.sigmoid, torch.tanh, functional.hardsigmoid):
        assert fixed_grid(function.__name__, torch.uint8) == (
            function(theirs).q_scale(),
            function(theirs).q_zero_point(),
        )
        assert pointwise(function, ours).grid == fixed_grid(function.__name__, torch.uint8)
    assert fixed_grid("tanh", torch.int8) == (2 / 256, 0)
    assert fixed_grid("elu", torch.uint8) is None
    assert pointwise(functional.elu, ours).grid == ours.grid


def test_bounds_become_the_levels_nearest_to_them() -> None:
    x = quantize_per_tensor(torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0]), 0.5, 10)
    assert clamp_levels(x, -1.2, 1.3).dequantize().tolist() == [-1.0, -1.0, 0.0, 1.0, 1.5]
    assert clamp_levels(x, None, 0.0).dequantize().tolist() == [-5.0, -1.0, 0.0, 0.0, 0.0]
    assert clamp_levels(x, -1e9, None).equals(x)


def test_a_clamp_in_place_changes_the_tensor_and_the_other_does_not() -> None:
    x = quantize_per_tensor(torch.tensor([-1.0, 1.0]), 0.5, 10)
    clamp_levels(x, 0.0, None)
    assert x.dequantize().tolist() == [-1.0, 1.0]
    assert clamp_levels_(x, 0.0, None) is x
    assert x.dequantize().tolist() == [0.0, 1.0]


@pytest.mark.parametrize("op", ["add", "mul", "add relu", "mul relu"])
def test_two_tensors_of_one_shape_or_not(op: str) -> None:
    """The op of one go and the way through floats are the same function."""
    torch.manual_seed(0)
    x, y = (quantize_per_tensor(torch.randn(4, 6), scale, 120) for scale in (0.02, 0.03))
    numbers: Tensor = getattr(torch, op.split(maxsplit=1)[0])(x.dequantize(), y.dequantize())
    wanted = quantize_per_tensor(numbers.relu() if "relu" in op else numbers, 0.05, 100)
    at_once, by_row = bytewise(op, x, y, (0.05, 100)), bytewise(op, x, y[:1], (0.05, 100))
    assert steps_apart(at_once, wanted) <= 1
    assert steps_apart(by_row[:1], wanted[:1]) <= 1
    assert by_row.shape == (4, 6)
    empty = bytewise(op, x[:0], y[:0], (0.05, 100))
    assert (empty.shape, empty.grid) == ((0, 6), (0.05, 100))


def test_joined_tensors_are_brought_onto_one_grid() -> None:
    parts = [quantize_per_tensor(torch.tensor([1.0, 2.0]), scale, zero) for scale, zero in ((0.5, 3), (0.25, 9))]
    made = cat_on_grid(parts, 0, (1.0, 7))
    assert made.grid == (1.0, 7)
    assert made.int_repr().tolist() == [8, 9, 8, 9]


def test_a_tensor_that_is_on_the_grid_is_not_rounded_again() -> None:
    x = quantize_per_tensor(torch.tensor([1.0]), 0.5, 3)
    assert requantize(x, (0.5, 3)) is x
    assert requantize(x, (0.5, 4)).int_repr().tolist() == [6]
    assert requantize(x, (0.5, 3), torch.int8).dtype is torch.int8


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("number", [0.0, 2.5, -0.75])
def test_a_factor_changes_the_scale_and_rounds_nothing(number: float, dtype: torch.dtype) -> None:
    low = torch.iinfo(dtype).min
    x = quantize_per_tensor((EVERY_LEVEL - 90) * 0.5, 0.5, low + 90, dtype)
    assert torch.equal(times_scalar(x, number).dequantize(), x.dequantize() * number)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("number", [3.0, -3.0, 0.0])
def test_a_sum_within_the_range_moves_the_zero_point_alone(number: float, dtype: torch.dtype) -> None:
    x = quantize_per_tensor((EVERY_LEVEL - 90) * 0.5, 0.5, torch.iinfo(dtype).min + 90, dtype)
    made = plus_scalar(x, number)
    assert torch.equal(made.int_repr(), x.int_repr())
    assert torch.equal(made.dequantize(), x.dequantize() + number)


@pytest.mark.parametrize("number", [100.0, -100.0])
def test_a_sum_beyond_the_range_has_a_wider_grid_that_holds_zero_and_all_of_it(number: float) -> None:
    x = quantize_per_tensor((EVERY_LEVEL - 90) * 0.5, 0.5, 90)
    made = plus_scalar(x, number)
    scale, zero_point = made.grid
    assert zero_point == (0 if number > 0 else 255)
    assert float((made.dequantize() - (x.dequantize() + number)).abs().max()) <= scale / 2 * 1.001
    furthest = float((x.dequantize() + number).abs().max())
    assert scale == pytest.approx(furthest / 255)


def test_in_float_rounds_once_onto_the_grid_of_the_first() -> None:
    x, y = quantize_per_tensor(torch.tensor([1.0, 3.0]), 0.5, 3), quantize_per_tensor(torch.tensor([0.1]), 0.1, 0)
    assert in_float(torch.add, x, y).grid == x.grid
    assert in_float(torch.add, x, y).dequantize().tolist() == [1.0, 3.0]
    assert in_float(torch.add, x, y, grid=(0.1, 0)).dequantize().tolist() == pytest.approx([1.1, 3.1])


def test_pools_are_torchs_and_of_bytes() -> None:
    ours, theirs = both(torch.randn(1, 2, 7, 7))
    windows: list[Any] = [(3,), (2, 1), ((3, 2), (2, 1), (1, 0)), (2, 2, 0, 2), (3, 2, 1, 1, True)]
    for window in windows:
        assert steps_apart(max_pool2d(ours, *window), functional.max_pool2d(theirs, *window)) == 0
    with pytest.raises(DataError, match="int32"):
        max_pool2d(quantize_per_tensor(torch.randn(1, 1, 4, 4), 0.1, 0, torch.int32), 2)


def test_floats_are_refused_by_the_name_of_the_function() -> None:
    with pytest.raises(MixedTensorsError, match="clamp"):
        clamp_levels(torch.randn(3), 0.0, None)
    with pytest.raises(MixedTensorsError, match="tanh"):
        pointwise(torch.tanh, torch.randn(3))
