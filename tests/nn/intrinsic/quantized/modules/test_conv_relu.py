"""Quantized convolutions that end in a ReLU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import SpecError
from quantc.nn import intrinsic, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs
from quantc.nn.intrinsic import quantized as intrinsic_quantized
from quantc.nn.observers import MinMaxObserver


def both_signs(scale: float) -> dict[str, torch.Tensor]:
    """A grid of steps twice as large that holds as many numbers below zero as above."""
    return {"scale": torch.tensor(2 * scale), "zero_point": torch.tensor(128, dtype=torch.uint8)}


AXES = [1, 2, 3]


def observed(axes: int) -> Any:
    torch.manual_seed(0)
    conv = getattr(nn, f"Conv{axes}d")(3, 4, 2, padding=1)
    fused = getattr(intrinsic, f"ConvReLU{axes}d")(conv, nn.ReLU())
    fused.qconfig = conv.qconfig = qconfigs.get_default_qconfig("x86")
    fused.activation_post_process = MinMaxObserver()
    fused.activation_post_process(fused(torch.randn(4, 3, *[4] * axes)))
    return fused


@pytest.mark.parametrize("axes", AXES)
def test_nothing_below_zero_comes_out_and_the_rest_is_the_plain_convolutions(axes: int) -> None:
    made = getattr(intrinsic_quantized, f"ConvReLU{axes}d").from_float(observed(axes))
    plain = getattr(quantized, f"Conv{axes}d")(3, 4, 2, padding=1)
    plain.load_state_dict({**made.state_dict(), **both_signs(made.scale)})
    x = quantize_per_tensor(torch.randn(2, 3, *[4] * axes), 0.03, 120)
    found, wanted = made(x).dequantize(), plain(x).dequantize()
    assert float(wanted.min()) < 0
    torch.testing.assert_close(found, wanted.relu(), atol=1.51 * made.scale, rtol=0)


@pytest.mark.parametrize("axes", AXES)
def test_each_is_made_of_its_own_sequence(axes: int) -> None:
    kind = getattr(intrinsic_quantized, f"ConvReLU{axes}d")
    assert kind._FLOAT_MODULE is getattr(intrinsic, f"ConvReLU{axes}d")
    assert kind.of is getattr(nn, f"Conv{axes}d")
    other: Any = observed(axes % 3 + 1)
    with pytest.raises(SpecError, match=f"made of Conv{axes}d"):
        kind.from_float(other)
