"""Fake quantizers of QConfigs in the place of the engine's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import QuantcError
from quantc.flows.foreign_observers import spec_of
from quantc.flows.fx import (
    convert_fx,
    get_default_qat_qconfig_mapping,
    prepare_qat_fx,
)
from quantc.flows.fx.training import ByFakeQuantize
from quantc.nn.fake_quantize import default_fake_quant, disable_fake_quant
from quantc.spec.formats import Role
from tests.support.fx_models import model_and_data


def test_training_trains_and_converts() -> None:
    model, data = model_and_data("classifier")
    prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(), (data[0],))
    assert prepared.training
    optimizer = torch.optim.Adam(prepared.parameters(), lr=0.02)
    target = torch.tensor([0.1, 0.9, 0.1, 0.9, 0.5])
    losses = []
    for x in data * 6:
        loss = (prepared(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]
    prepared.eval()
    twin = copy.deepcopy(prepared)
    with torch.no_grad():
        quantized = convert_fx(prepared)
        assert float((quantized(data[0]) - twin(data[0])).abs().max()) <= 2.1 / 256
    assert all(row.kernel for row in quantized.placed)


def test_training_needs_data_before_it_is_converted() -> None:
    model, data = model_and_data("perceptron")
    prepared = prepare_qat_fx(model.train(), get_default_qat_qconfig_mapping(), (data[0],))
    with pytest.raises(QuantcError, match="not trained"):
        convert_fx(prepared)


def prepared() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).train()
    return prepare_qat_fx(model, get_default_qat_qconfig_mapping("x86"), (torch.randn(8, 4),))


def test_qconfigs_make_what_rounds_activations_and_weights() -> None:
    fakes = [module for module in prepared().modules() if isinstance(module, ByFakeQuantize)]
    kinds = {type(fake.module).__name__ for fake in fakes}
    assert kinds == {"FusedMovingAvgObsFakeQuantize"}
    assert {fake.spec.role for fake in fakes} == {Role.ACT, Role.WEIGHT}


def test_a_fake_quantizer_says_what_its_module_found() -> None:
    module = default_fake_quant()
    fake = ByFakeQuantize("group", spec_of(module), "here", module)
    assert fake.why_unfit()
    x = torch.linspace(-1, 1, 64)
    made = fake(x)
    assert fake.why_unfit() is None
    assert torch.equal(made, module(x))
    scale, zero_point = module.calculate_qparams()
    for found in (fake.trained(), fake.find(x)):
        assert torch.equal(found.scale.reshape(-1), scale)
        assert torch.equal(found.zero_point.reshape(-1), zero_point.long())


def test_a_batch_of_nothing_is_left_alone() -> None:
    module = default_fake_quant()
    fake = ByFakeQuantize("group", spec_of(module), "here", module)
    assert fake(torch.empty(0, 3)).shape == (0, 3)
    assert fake.why_unfit()


def test_switches_of_fake_quantizers_reach_them() -> None:
    model, x = prepared(), torch.randn(8, 4)
    rounded = model(x)
    model.apply(disable_fake_quant)
    exact = nn.functional.linear(torch.relu(nn.functional.linear(x, *model.get_submodule("0").parameters())),
                                 *model.get_submodule("2").parameters())  # fmt: skip
    assert torch.equal(model(x), exact)
    assert not torch.equal(rounded, exact)
