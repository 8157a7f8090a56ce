"""The linear layer with a ReLU, for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import SpecError
from quantc.nn import intrinsic
from quantc.nn.intrinsic import qat as intrinsic_qat
from quantc.nn.qconfig import default_qat_qconfig


def trained() -> tuple[intrinsic_qat.LinearReLU, Any]:
    torch.manual_seed(0)
    fused: Any = intrinsic.LinearReLU(nn.Linear(6, 4), nn.ReLU())
    fused.qconfig = default_qat_qconfig
    return intrinsic_qat.LinearReLU.from_float(fused), fused


def test_what_comes_out_is_the_relu_of_the_product_with_the_rounded_weight() -> None:
    made, fused = trained()
    x = torch.randn(3, 6)
    weight = made.weight_fake_quant(fused[0].weight)
    assert not torch.equal(weight, fused[0].weight)
    assert torch.equal(made(x), torch.relu(nn.functional.linear(x, weight, fused[0].bias)))


def test_it_learns_the_parameters_of_the_sequence_and_gives_it_back() -> None:
    made, fused = trained()
    assert made.weight is fused[0].weight
    back = made.to_float()
    assert type(back) is intrinsic.LinearReLU
    x = torch.randn(3, 6)
    assert torch.equal(back(x), fused(x))


def test_a_layer_without_the_relu_is_refused() -> None:
    with pytest.raises(SpecError, match="made of LinearReLU, not of Linear"):
        intrinsic_qat.LinearReLU.from_float(nn.Linear(6, 4))
