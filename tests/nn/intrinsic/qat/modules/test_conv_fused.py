"""Convolutions with what follows them, for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.nn import intrinsic
from quantc.nn.intrinsic import qat as intrinsic_qat
from quantc.nn.intrinsic.qat.modules.conv_fused import freeze_bn_stats, update_bn_stats
from quantc.nn.qconfig import default_qat_qconfig

NAMES = [f"Conv{middle}{axes}d" for middle in ("ReLU", "Bn", "BnReLU") for axes in (1, 2, 3)]


def trained(name: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    axes = int(name[-2])
    parts: list[Any] = [getattr(nn, f"Conv{axes}d")(2, 3, 2, stride=2, bias=axes != 2)]
    parts += [getattr(nn, f"BatchNorm{axes}d")(3)] if "Bn" in name else []
    parts += [nn.ReLU()] if "ReLU" in name else []
    fused = getattr(intrinsic, name)(*parts)
    fused.qconfig = default_qat_qconfig
    return getattr(intrinsic_qat, name).from_float(fused.train()), fused


def images(name: str) -> torch.Tensor:
    return torch.randn(4, 2, *[4] * int(name[-2]))


@pytest.mark.parametrize("name", NAMES)
def test_without_rounding_it_is_the_sequence(name: str) -> None:
    made, fused = trained(name)
    made.weight_fake_quant.disable_fake_quant()
    x = images(name)
    torch.testing.assert_close(made(x), fused(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(made.eval()(x), fused.eval()(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_back_in_float_the_norm_is_folded_and_the_relu_stays(name: str) -> None:
    made, fused = trained(name)
    back = made.eval().to_float()
    wanted = f"ConvReLU{name[-2]}d" if "ReLU" in name else f"Conv{name[-2]}d"
    assert type(back).__name__ == wanted
    x = images(name)
    torch.testing.assert_close(back(x), fused.eval()(x), atol=1e-5, rtol=1e-5)


def test_running_statistics_are_frozen_and_counted_again() -> None:
    made, _ = trained("ConvBn1d")
    model = nn.Sequential(made)
    model.apply(freeze_bn_stats)
    before = made.bn.running_mean.clone()
    model(images("ConvBn1d") + 3)
    assert torch.equal(made.bn.running_mean, before)
    model.train()
    model(images("ConvBn1d") + 3)
    assert torch.equal(made.bn.running_mean, before), "also after train()"
    model.apply(update_bn_stats)
    model(images("ConvBn1d") + 3)
    assert not torch.equal(made.bn.running_mean, before)


def test_a_norm_may_be_frozen_from_the_start() -> None:
    made = intrinsic_qat.ConvBn2d(2, 3, 1, freeze_bn=True, eps=0.5, qconfig=default_qat_qconfig)
    assert (made.freeze_bn, made.bn.training, made.bn.eps) == (True, False, 0.5)
