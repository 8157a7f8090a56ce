"""The quantized linear layer that ends in a ReLU."""

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


def observed() -> Any:
    torch.manual_seed(0)
    fused: Any = intrinsic.LinearReLU(nn.Linear(6, 4), nn.ReLU())
    fused.qconfig = fused[0].qconfig = qconfigs.get_default_qconfig("x86")
    fused.activation_post_process = MinMaxObserver()
    fused.activation_post_process(fused(torch.randn(20, 6)))
    return fused


def test_nothing_below_zero_comes_out_and_the_rest_is_the_plain_layers() -> None:
    made = intrinsic_quantized.LinearReLU.from_float(observed())
    x = quantize_per_tensor(torch.randn(5, 6), 0.03, 120)
    plain = quantized.Linear(6, 4)
    plain.load_state_dict({**made.state_dict(), **both_signs(made.scale)})
    found, wanted = made(x).dequantize(), plain(x).dequantize()
    assert float(wanted.min()) < 0
    torch.testing.assert_close(found, wanted.relu(), atol=1.51 * made.scale, rtol=0)


def test_it_is_made_of_the_sequence_alone() -> None:
    assert intrinsic_quantized.LinearReLU._FLOAT_MODULE is intrinsic.LinearReLU
    with pytest.raises(SpecError, match="ends in a ReLU"):
        intrinsic_quantized.LinearReLU.from_float(nn.Linear(6, 4))
    assert repr(intrinsic_quantized.LinearReLU(6, 4)).startswith("QuantizedLinearReLU(in_features=6")
