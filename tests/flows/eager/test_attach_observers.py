"""Observers on the layers of a model: where they are put, the hooks that call them, and how they come off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization as ao
from torch import Tensor, nn
from torch.ao.quantization.quantize import _add_observer_

import quantc.nn.intrinsic as nni
from quantc.errors import QuantcError
from quantc.flows import eager
from quantc.flows.eager import attach_observers
from quantc.flows.eager.propagate import propagate_qconfig_
from quantc.nn import quantizable
from quantc.nn.quantized import FloatFunctional
from tests.support.eager_small import hooks, small, with_qconfig


def observed(model: nn.Module) -> nn.Module:
    propagate_qconfig_(with_qconfig(model))
    attach_observers.add_observer(model)
    return model


def test_observers_are_where_those_of_torch_are() -> None:
    def build(stub: Any) -> nn.Module:
        return nn.Sequential(stub(), nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(), nn.Dropout()), nn.Linear(4, 4))

    ours, theirs = observed(build(eager.QuantStub)), build(ao.QuantStub)
    vars(theirs)["qconfig"] = ao.get_default_qconfig("fbgemm")  # type: ignore[no-untyped-call]
    ao.propagate_qconfig_(theirs)  # type: ignore[no-untyped-call]
    _add_observer_(theirs)  # type: ignore[no-untyped-call]
    wanted = [name for name, _ in theirs.named_modules() if name.endswith("activation_post_process")]
    assert list(attach_observers.get_observer_dict(ours)) == wanted
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_an_observer_sees_what_its_layer_yields_before_hooks_of_users() -> None:
    layer: Any = with_qconfig(nn.Linear(2, 2).eval())
    order: list[str] = []
    layer.register_forward_hook(lambda *_: order.append("user"))
    attach_observers.add_observer(layer)
    layer.activation_post_process.register_forward_hook(lambda *_: order.append("observer"))
    y = layer(torch.tensor([[1.0, -2.0]]))
    assert order == ["observer", "user"]
    assert float(layer.activation_post_process.min_val) == float(y.detach().min())


def test_a_pre_hook_shows_what_is_read() -> None:
    layer: Any = nn.ReLU()
    layer.activation_post_process = eager.MinMaxObserver()
    attach_observers.register_activation_post_process_hook(layer, pre_hook=True)
    layer(torch.tensor([-3.0, 5.0]))
    assert float(layer.activation_post_process.min_val) == -3.0


def test_a_hook_without_an_observer_is_refused() -> None:
    with pytest.raises(eager.EagerError, match="ReLU"):
        attach_observers.register_activation_post_process_hook(nn.ReLU())


def test_a_second_observer_is_refused() -> None:
    model = observed(nn.Sequential(nni.LinearReLU(nn.Linear(2, 2), nn.ReLU())))
    with pytest.raises(eager.AlreadyDoneError, match="LinearReLU"):
        attach_observers.add_observer(model)


def test_layers_without_qconfig_and_dequant_stubs_have_none() -> None:
    model: Any = nn.Sequential(eager.QuantStub(), nn.Linear(2, 2), nn.Linear(2, 2), eager.DeQuantStub())
    model[1].qconfig = None
    assert list(attach_observers.get_observer_dict(observed(model), prefix="m")) == [
        "m.0.activation_post_process",
        "m.2.activation_post_process",
    ]


def test_functional_modules_are_given_one_without_a_hook() -> None:
    model: Any = nn.Sequential(FloatFunctional())
    observed(model)
    assert attach_observers.is_observer_like(model[0].activation_post_process)
    assert hooks(model) == 0


def test_a_module_of_several_steps_becomes_its_observed_class() -> None:
    model: Any = nn.Sequential(nn.LSTM(2, 3))
    propagate_qconfig_(with_qconfig(model.eval()))
    attach_observers.add_observer(model, custom_module_class_mapping={nn.LSTM: quantizable.LSTM})
    assert isinstance(model[0], quantizable.LSTM)
    assert not model[0].training
    steps = attach_observers.get_observer_dict(model)
    assert len(steps) > 1
    assert "0.activation_post_process" not in steps


def test_observers_and_hooks_come_off_and_those_of_users_stay() -> None:
    model = small()
    model.get_submodule("fc").register_forward_hook(lambda *_: None)
    propagate_qconfig_(model)
    attach_observers.add_observer(model)
    assert hooks(model) > 1
    attach_observers.remove_observers(model)
    assert attach_observers.get_observer_dict(model) == {}
    assert hooks(model) == 1
    assert attach_observers.needs_observation(model)
    attach_observers.remove_qconfig(model)
    assert not any(attach_observers.needs_observation(module) for module in model.modules())


def test_found_observers_are_put_into_the_dict_given() -> None:
    target: dict[str, Any] = {"other": 1}
    found = attach_observers.get_observer_dict(observed(nn.Linear(2, 2)), target)
    assert found is target
    assert list(found) == ["other", "activation_post_process"]


def test_tensors_on_two_devices_are_refused_and_meta_is_none() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("here", torch.zeros(1))
            self.register_buffer("nowhere", torch.zeros(1, device="meta"))

    assert attach_observers.one_device(Apart(), "this") == torch.device("cpu")
    assert attach_observers.one_device(nn.ReLU(), "this") is None


def test_any_module_that_finds_qparams_is_like_an_observer() -> None:
    class Own(nn.Module):
        def calculate_qparams(self) -> tuple[Tensor, Tensor]:
            return torch.ones(1), torch.zeros(1)

    layer = nn.Linear(2, 2)
    assert attach_observers.observer_of(layer) is None
    layer.activation_post_process = nn.Identity()
    assert attach_observers.observer_of(layer) is None
    layer.activation_post_process = Own()
    assert attach_observers.observer_of(layer) is layer.activation_post_process
    assert attach_observers.is_childless(nn.ReLU())
    assert not attach_observers.is_childless(layer)


def test_devices_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {torch.device("cpu"), torch.device("cuda", 0)}
    monkeypatch.setattr(attach_observers, "devices_of", lambda module: there)
    with pytest.raises(QuantcError, match="swapping") as caught:
        attach_observers.one_device(nn.ReLU(), "swapping")
    assert caught.value.where == "cpu, cuda:0"
