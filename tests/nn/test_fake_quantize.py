"""Fake quantization as modules: it computes, learns and saves what torch's does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import quantc.nn.fake_quantize as own_fakes
import quantc.nn.observers as own_observers
from quantc.nn.constructors import Constructor
from tests.support.observer_cases import alike, ao, named, same


@pytest.mark.parametrize("name", named(own_fakes, Constructor))
def test_the_named_fake_quantizers_are_torch_s(name: str) -> None:
    alike(getattr(own_fakes, name)(), getattr(ao.fake_quantize, name)())


FAKES = ["FakeQuantize", "FusedMovingAvgObsFakeQuantize"]


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("by_channel", [False, True])
def test_fake_quantizers_compute_and_learn_what_torch_s_do(name: str, by_channel: bool) -> None:
    torch.manual_seed(3)
    observer = "MovingAveragePerChannelMinMaxObserver" if by_channel else "MovingAverageMinMaxObserver"
    scheme = torch.per_channel_symmetric if by_channel else torch.per_tensor_affine
    ends = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": scheme}
    mine = getattr(own_fakes, name)(observer=getattr(own_observers, observer), **ends)
    theirs = getattr(ao, name)(observer=getattr(ao, observer), **ends)
    for step in range(4):
        x = torch.randn(4, 6) * (1 + step)
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        if step == 3:
            mine.disable_observer()
            theirs.disable_observer()
        out, expected = mine(left), theirs(right)
        assert torch.equal(out, expected)
        out.square().sum().backward()
        expected.square().sum().backward()
        assert left.grad is not None
        assert right.grad is not None
        assert torch.equal(left.grad, right.grad)
    x = torch.randn(4, 6)
    same(mine.calculate_qparams(), theirs.calculate_qparams())
    fresh = getattr(own_fakes, name)(observer=getattr(own_observers, observer), **ends)
    fresh.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(mine.state_dict())
    assert torch.equal(fresh.eval()(x), theirs.eval()(x))


def test_switches_reach_every_fake_quantizer_of_a_model() -> None:
    first = own_fakes.default_fake_quant()
    model = nn.Sequential(first, nn.ReLU(), own_fakes.default_fused_act_fake_quant())
    model.apply(own_fakes.disable_fake_quant)
    x = torch.randn(2, 3)
    assert torch.equal(model(x), x.relu())
    model.apply(own_fakes.enable_fake_quant)
    model.apply(own_fakes.disable_observer)
    before = first.scale.clone()
    model(x * 100)
    assert torch.equal(first.scale, before)
