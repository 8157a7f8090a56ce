"""Convolutions for training: the weight is rounded, and gradients reach it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import SpecError
from quantc.nn import qat
from quantc.nn.qconfig import default_qat_qconfig

AXES = [1, 2, 3]
SETTINGS: dict[str, Any] = {
    "stride": 2,
    "padding": 1,
    "dilation": 1,
    "groups": 2,
    "bias": False,
    "padding_mode": "reflect",
}


def trained(axes: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    source = getattr(nn, f"Conv{axes}d")(2, 4, 2, **SETTINGS)
    source.qconfig = default_qat_qconfig
    return getattr(qat, f"Conv{axes}d").from_float(source), source


@pytest.mark.parametrize("axes", AXES)
def test_it_is_the_float_convolution_with_the_rounded_weight(axes: int) -> None:
    made, source = trained(axes)
    x = torch.randn(2, 2, *[5] * axes)
    found = made(x)
    rounded = made.weight_fake_quant(source.weight)
    assert not torch.equal(rounded, source.weight)
    assert torch.equal(found, source._conv_forward(x, rounded, None))
    found.square().sum().backward()
    assert source.weight.grad is not None, "parameters are shared"


@pytest.mark.parametrize("axes", AXES)
def test_back_in_float_it_has_the_settings_it_was_made_with(axes: int) -> None:
    made, source = trained(axes)
    back = made.to_float()
    assert type(back) is type(source)
    assert repr(back) == repr(source)
    assert torch.equal(back.weight, source.weight)
    assert back.weight is not source.weight


def test_each_is_made_of_its_own_kind_with_a_qconfig() -> None:
    with pytest.raises(SpecError, match="made of Conv2d, not of Conv1d"):
        qat.Conv2d.from_float(nn.Conv1d(1, 1, 1))
    with pytest.raises(SpecError, match="qconfig"):
        qat.Conv1d(1, 1, 1)
    made = qat.Conv1d(1, 2, 3, 1, 1, qconfig=default_qat_qconfig)
    assert (made.kernel_size, made.padding) == ((3,), (1,))
