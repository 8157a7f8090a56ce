"""Int8 weights of float ops, dequantized once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quantc import QuantSpec
from tests.support.stored_weights import FORMATS, kernels, lowered


@pytest.mark.parametrize("spec", FORMATS.values(), ids=FORMATS)
def test_convolutions_read_a_float_weight_that_is_made_once(spec: QuantSpec) -> None:
    x = torch.randn(2, 32, 9, 9)
    program, module = lowered(nn.Conv2d(32, 40, 3), x, spec)
    assert [row.kernel for row in module.placed] == ["float32 weight made once"]
    assert torch.allclose(module(x), program(x), rtol=1e-5, atol=1e-5)
    (kernel,) = kernels(module)
    assert kernel() is kernel()
