"""Linear layers and convolutions of quantized tensors on the kernels of a target."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantc.nn import observers, quantize_per_tensor, quantized
from quantc.nn import qconfig as qconfigs


def test_a_channel_of_zeros_with_a_large_bias() -> None:
    """Its scale is the smallest there is, in steps of which the bias would overflow the accumulator."""
    torch.manual_seed(0)
    module = nn.Linear(8, 3)
    module.weight.data[1] = 0
    module.bias.data[1] = 500.0
    x = torch.randn(4, 8)
    module.qconfig = qconfigs.get_default_qconfig("x86")  # type: ignore[assignment]
    observer = observers.MinMaxObserver()
    observer(module(x))
    module.activation_post_process = observer
    made = quantized.Linear.from_float(module)
    found = made(quantize_per_tensor(x, 0.0005, 117)).dequantize()
    assert found[:, 1].tolist() == pytest.approx([500.0] * 4, abs=made.scale)
