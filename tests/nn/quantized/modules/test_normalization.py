"""Quantized normalizations: what the float ones make of the numbers, on a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.nn import quantize_per_tensor, quantized
from tests.support.nn_cases import steps_apart

NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "LayerNorm": (lambda: nn.LayerNorm([3, 4], eps=0.01), (2, 3, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(3, 6, eps=0.01), (2, 6, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(6, affine=True), (2, 6, 5)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6), (2, 6, 4, 4)),
    "InstanceNorm3d": (lambda: nn.InstanceNorm3d(6, affine=True), (2, 6, 3, 3, 3)),
}
GRID = (0.0625, 100)


def seeded(name: str) -> Any:
    torch.manual_seed(0)
    norm = NORMS[name][0]()
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    return norm.eval()


@pytest.mark.parametrize("name", NORMS)
def test_what_is_rounded_is_what_the_float_module_makes_of_the_numbers(name: str) -> None:
    norm = seeded(name)
    made = getattr(quantized, name).from_reference(norm, *GRID)
    x = quantize_per_tensor(torch.randn(NORMS[name][1]), 0.03, 120)
    assert steps_apart(made(x), quantize_per_tensor(norm(x.dequantize()).detach(), *GRID)) == 0


@pytest.mark.parametrize("name", NORMS)
def test_each_says_which_float_module_it_is_made_of(name: str) -> None:
    kind = getattr(quantized, name)
    assert kind._FLOAT_MODULE is getattr(nn, name)
    assert issubclass(kind, getattr(nn, name))


def test_groups_come_before_the_weight() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    made = quantized.GroupNorm(2, 4, weight, None, *GRID)
    assert (made.num_groups, made.num_channels, made.scale) == (2, 4, GRID[0])
    assert torch.equal(made.weight, weight)
