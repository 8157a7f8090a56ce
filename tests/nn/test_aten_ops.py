"""ATen's ops that quantc computes on quantized tensors: what models call as functions, or as float modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

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
