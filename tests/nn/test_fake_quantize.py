"""Fake quantization as modules: it computes, learns and saves what torch's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import quantc.nn.fake_quantize as own_fakes
import quantc.nn.observers as own_observers
from quantc.errors import SpecError
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


@pytest.mark.parametrize(
    ("make", "keywords", "word"),
    [
        (own_fakes.FakeQuantize, {"quant_min": -4, "quant_max": 300}, r"-4\.\.300"),
        (own_fakes.FakeQuantize, {"quant_min": 9, "quant_max": 3}, r"9\.\.3"),
        (own_fakes.FakeQuantize, {"quant_min": 0, "quant_max": 255, "dtype": torch.qint8}, "qint8"),
        (own_fakes.FusedMovingAvgObsFakeQuantize, {"observer": own_observers.MinMaxObserver}, "MinMaxObserver"),
        (own_fakes.FixedQParamsFakeQuantize, {"observer": own_observers.MinMaxObserver}, "MinMaxObserver"),
    ],
)
def test_ranges_and_observers_that_do_not_fit_are_refused(make: Any, keywords: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        make(**keywords)


def test_the_dtype_of_a_constructor_counts_for_the_range() -> None:
    observer = own_observers.MinMaxObserver.with_args(dtype=torch.qint8)
    assert own_fakes.FakeQuantize(observer=observer, quant_min=-128, quant_max=127).dtype is torch.qint8
    with pytest.raises(SpecError, match="qint8"):
        own_fakes.FakeQuantize(observer=observer, quant_min=0, quant_max=255)


def test_a_known_grid_is_rounded_to_whatever_the_data() -> None:
    fake = own_fakes.default_fixed_qparams_range_0to1_fake_quant()
    assert fake(torch.tensor([0.5 + 1 / 1024, 7.0, -3.0])).tolist() == [0.5, 255 / 256, 0.0]


def test_switched_off_it_still_observes_and_gives_back_the_tensor_itself() -> None:
    fake, x = own_fakes.FakeQuantize(), torch.tensor([-1.0, 2.55])
    fake.disable_fake_quant()
    assert fake(x) is x
    assert float(fake.activation_post_process.max_val) == pytest.approx(2.55)
    fake.enable_fake_quant()
    assert fake(x) is not x


def test_scales_by_channel_are_loaded_into_one_that_has_seen_nothing() -> None:
    seen, fresh = (own_fakes.default_per_channel_weight_fake_quant() for _ in range(2))
    x = torch.tensor([[1.0, -0.3], [0.2, 8.0], [0.0, 4.0]])
    wanted = seen(x)
    fresh.load_state_dict(seen.state_dict())
    fresh.disable_observer()
    assert fresh.scale.shape == (3,)
    assert torch.equal(fresh(x), wanted)
