"""Quantized batch norms: running statistics between two roundings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.nn import quantize_per_tensor, quantized

GRID = (0.0625, 100)


def trained(axes: int) -> Any:
    torch.manual_seed(0)
    norm = getattr(nn, f"BatchNorm{axes}d")(3, eps=0.1)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.uniform_(0.5, 2.0)
    return norm.eval()


@pytest.mark.parametrize("axes", [2, 3])
def test_what_is_rounded_is_what_running_statistics_make_of_the_numbers(axes: int) -> None:
    norm = trained(axes)
    made = getattr(quantized, f"BatchNorm{axes}d").from_reference(norm, *GRID)
    x = quantize_per_tensor(torch.randn(2, 3, *[4] * axes), 0.03, 120)
    assert made(x).equals(quantize_per_tensor(norm(x.dequantize()).detach(), *GRID))


def test_one_that_is_made_anew_passes_numbers_on() -> None:
    made = quantized.BatchNorm2d(3, eps=0.0)
    x = quantize_per_tensor(torch.arange(12.0).reshape(1, 3, 2, 2), 1.0, 0)
    assert torch.equal(made(x).dequantize(), x.dequantize())
    assert made._FLOAT_MODULE is nn.BatchNorm2d


def test_statistics_are_saved_and_loaded() -> None:
    made = quantized.BatchNorm2d.from_reference(trained(2), *GRID)
    other = quantized.BatchNorm2d(3, eps=0.1)
    other.load_state_dict(made.state_dict())
    x = quantize_per_tensor(torch.randn(2, 3, 4, 4), 0.03, 120)
    assert other(x).equals(made(x))
