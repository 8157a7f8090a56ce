"""The linear layer for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import SpecError
from quantc.nn import qat
from quantc.nn.qconfig import default_qat_qconfig


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    source: Any = nn.Linear(3, 2)
    source.qconfig = default_qat_qconfig
    return qat.Linear.from_float(source), source


def test_it_is_the_float_layer_with_the_rounded_weight() -> None:
    made, source = trained()
    x = torch.randn(4, 3)
    found = made(x)
    rounded = made.weight_fake_quant(source.weight)
    assert torch.equal(found, nn.functional.linear(x, rounded, source.bias))
    assert not torch.equal(found, source(x))
    made.weight_fake_quant.disable_fake_quant()
    assert torch.equal(made(x), source(x))


def test_a_step_changes_the_float_layer_too() -> None:
    made, source = trained()
    before = source.weight.clone()
    made(torch.randn(4, 3)).square().sum().backward()
    torch.optim.SGD(made.parameters(), lr=0.1).step()
    assert not torch.equal(source.weight, before)
    assert torch.equal(made.to_float().weight, source.weight)


def test_it_is_made_of_a_linear_layer_with_a_qconfig() -> None:
    with pytest.raises(SpecError, match="qconfig"):
        qat.Linear.from_float(nn.Linear(3, 2))
    with pytest.raises(SpecError, match="made of Linear, not of Conv1d"):
        qat.Linear.from_float(nn.Conv1d(1, 1, 1))
    assert qat.Linear(3, 2, False, default_qat_qconfig).bias is None
