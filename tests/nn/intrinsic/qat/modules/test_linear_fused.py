"""The linear layer with a batch norm, for training: the norm is folded into what is rounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quantc.nn import intrinsic
from quantc.nn.intrinsic import qat as intrinsic_qat
from quantc.nn.qconfig import default_qat_qconfig


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    fused: Any = intrinsic.LinearBn1d(nn.Linear(6, 4), nn.BatchNorm1d(4))
    fused.qconfig = default_qat_qconfig
    for tensor in (fused[1].weight.data, fused[1].bias.data, fused[1].running_mean, fused[1].running_var):
        tensor.uniform_(0.5, 2.0)
    return intrinsic_qat.LinearBn1d.from_float(fused.train()), fused


def test_without_rounding_it_is_the_layer_and_the_norm_in_either_mode() -> None:
    made, fused = trained()
    made.weight_fake_quant.disable_fake_quant()
    x = torch.randn(5, 6)
    torch.testing.assert_close(made.eval()(x), fused.eval()(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.train()(x), fused.train()(x), atol=1e-5, rtol=1e-5)


def test_what_is_rounded_is_the_weight_with_the_norm_in_it() -> None:
    made, fused = trained()
    made.eval()
    x = torch.randn(5, 6)
    factor = fused[1].weight / torch.sqrt(fused[1].running_var + fused[1].eps)
    rounded = made.weight_fake_quant(fused[0].weight * factor[:, None])
    bias = (fused[0].bias - fused[1].running_mean) * factor + fused[1].bias
    torch.testing.assert_close(made(x), nn.functional.linear(x, rounded, bias), atol=1e-5, rtol=1e-5)


def test_back_in_float_it_is_a_linear_layer() -> None:
    made, fused = trained()
    back = made.to_float()
    assert type(back) is nn.Linear
    x = torch.randn(5, 6)
    torch.testing.assert_close(back(x), fused.eval()(x), atol=1e-5, rtol=1e-5)


def test_a_channel_that_the_norm_switches_off_learns_in_float() -> None:
    made, _ = trained()
    with torch.no_grad():
        made.bn.weight[1] = 0.0
    result = made(torch.randn(5, 6))
    assert bool(result.isfinite().all())
    result.square().sum().backward()
    assert bool(made.bn.weight.grad.isfinite().all())
