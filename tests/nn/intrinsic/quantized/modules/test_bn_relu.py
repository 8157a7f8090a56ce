"""Quantized batch norms that end in a ReLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.nn import intrinsic, quantize_per_tensor
from quantc.nn.intrinsic import quantized as intrinsic_quantized
from quantc.nn.observers import MinMaxObserver


@pytest.mark.parametrize("axes", [2, 3])
def test_what_is_rounded_is_what_the_sequence_makes_of_the_numbers(axes: int) -> None:
    torch.manual_seed(0)
    norm: Any = getattr(nn, f"BatchNorm{axes}d")(3)
    for tensor in (norm.weight.data, norm.bias.data, norm.running_mean, norm.running_var):
        tensor.uniform_(-1.0, 1.0).abs_() if tensor is norm.running_var else tensor.uniform_(-1.0, 1.0)
    fused = getattr(intrinsic, f"BNReLU{axes}d")(norm, nn.ReLU()).eval()
    fused.activation_post_process = MinMaxObserver()
    x = quantize_per_tensor(torch.randn(2, 3, *[4] * axes), 0.03, 120)
    with torch.no_grad():
        wanted = fused(x.dequantize())
    fused.activation_post_process(wanted)
    kind = getattr(intrinsic_quantized, f"BNReLU{axes}d")
    made = kind.from_float(fused)
    assert made(x).equals(quantize_per_tensor(wanted, made.scale, made.zero_point))
    made.zero_point = 128  # a grid that holds numbers below zero as well
    assert float(made(x).dequantize().min()) == 0
    assert kind._FLOAT_MODULE is getattr(intrinsic, f"BNReLU{axes}d")
    assert f"QuantizedBNReLU{axes}d" in repr(made)
