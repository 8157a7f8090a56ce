"""ATen's ops that quantc computes on quantized tensors: what models call as functions, or as float modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from quantc.nn import quantize_per_tensor
from tests.support.nn_cases import both, steps_apart

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relu": functional.relu,
    "relu in place": lambda q: functional.relu(q.clone(), inplace=True),
    "relu6": functional.relu6,
    "hardtanh": functional.hardtanh,
    "clamp": lambda q: torch.clamp(q, -0.5, 0.7),
    "leaky_relu": lambda q: functional.leaky_relu(q, 0.2),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hardsigmoid": functional.hardsigmoid,
    "threshold": lambda q: functional.threshold(q, 0.1, 0.2),
    "max_pool2d": lambda q: functional.max_pool2d(q, 3, 2, 1),
    "max_pool2d module": nn.MaxPool2d(2),
    "avg_pool2d": lambda q: functional.avg_pool2d(q, 2),
    "adaptive": nn.AdaptiveAvgPool2d(2),
    "mean": lambda q: q.mean([2, 3]),
    "nearest": lambda q: functional.interpolate(q, scale_factor=2.0),
    "bilinear": lambda q: functional.interpolate(q, scale_factor=2.0, mode="bilinear"),
    "dropout": nn.Dropout().eval(),
    "sequence": nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Identity()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("inference", [False, True])
def test_functions_are_torchs(name: str, inference: bool) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        ours, theirs = both(torch.randn(2, 4, 8, 8))
        found, wanted = FUNCTIONS[name](ours), FUNCTIONS[name](theirs)
    is_average = name in ("avg_pool2d", "adaptive", "mean", "bilinear")
    assert steps_apart(found, wanted) <= int(is_average)


@pytest.mark.parametrize("function", [functional.selu, lambda x: torch.ops.aten.elu(x, 0.5, 2.0, 1.5)])
def test_scales_of_elu_count(function: Callable[[Any], Any]) -> None:
    q = quantize_per_tensor(torch.linspace(-3, 3, 61), 0.05, 128, torch.uint8)
    assert function(q).equals(quantize_per_tensor(function(q.dequantize()), 0.05, 128, torch.uint8))


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "relu_": lambda q: q.relu_(),
    "hardtanh_": lambda q: functional.hardtanh_(q, -0.5, 0.7),
    "relu6": lambda q: functional.relu6(q, inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_op_in_place_writes_into_the_tensor(name: str) -> None:
    ours, theirs = both(torch.linspace(-4, 4, 50))
    IN_PLACE[name](ours)
    IN_PLACE[name](theirs)
    assert steps_apart(ours, theirs) == 0


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda q: torch.clamp_min(q, -0.5), [-0.5, 0.0, 3.0]),
        (lambda q: torch.clamp_max(q, 0.5), [-2.0, 0.0, 0.5]),
        (lambda q: torch.clamp(q, max=1.0), [-2.0, 0.0, 1.0]),
        (lambda q: torch.clamp(q, min=-1.0), [-1.0, 0.0, 3.0]),
        (lambda q: q.clone().clamp_(-1.0, 1.0), [-1.0, 0.0, 1.0]),
        (lambda q: q.clone().clamp_min_(0.5), [0.5, 0.5, 3.0]),
    ],
)
def test_bounds_on_either_side(function: Callable[[Any], Any], wanted: list[float]) -> None:
    q = quantize_per_tensor(torch.tensor([-2.0, 0.0, 3.0]), 0.5, 100)
    assert function(q).dequantize().tolist() == wanted


def test_nothing_is_dropped_from_what_is_quantized() -> None:
    q: Any = quantize_per_tensor(torch.ones(100), 0.5, 100)
    made, kept = torch.native_dropout(q, 0.9, True)
    assert made is q
    assert bool(kept.all())


def test_averages_stay_on_the_grid_of_what_they_read() -> None:
    q: Any = quantize_per_tensor(torch.tensor([[1.0, 2.0, 4.0]]), 0.5, 10)
    assert q.mean().grid == q.grid
    assert q.mean().dequantize().item() == 2.5  # 7/3, in steps of a half
    assert functional.pad(q, (1, 1), mode="reflect").dequantize().tolist() == [[2.0, 1.0, 2.0, 4.0, 2.0]]
