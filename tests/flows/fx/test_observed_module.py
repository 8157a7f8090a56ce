"""What prepare_fx gives: a module that is called to calibrate it, copied, and loaded."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import InputError, SaveError
from quantc.flows.fx import (
    PrepareCustomConfig,
    convert_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from quantc.flows.observers import (
    HistogramObserver,
)
from tests.support.fx_small import batches, layers, prepared_layers


def test_a_prepared_model_computes_what_the_model_does() -> None:
    prepared, model = prepared_layers(), layers()
    assert torch.equal(prepared(batches()[0]), model(batches()[0]))
    observers = {name: module for name, module in prepared.named_children() if name.startswith("activation_post")}
    assert list(observers) == [f"activation_post_process_{number}" for number in range(3)]
    assert all(isinstance(module, HistogramObserver) for module in observers.values())
    assert {"0.weight", "0.bias", "2.weight", "activation_post_process_0.min_val"} <= set(prepared.state_dict())


def test_copies_are_independent() -> None:
    prepared = prepared_layers()
    before = prepared.activation_post_process_0.max_val.clone()
    twin = copy.deepcopy(prepared)
    twin(100 * batches()[0])
    assert torch.equal(prepared.activation_post_process_0.max_val, before)
    assert float(twin.activation_post_process_0.max_val) > 50
    twin.get_parameter("0.weight").data.zero_()
    assert float(prepared.get_parameter("0.weight").abs().max()) > 0
    convert_fx(twin)


def test_a_state_dict_carries_a_calibration() -> None:
    prepared = prepared_layers()
    fresh = prepare_fx(layers(), get_default_qconfig_mapping(), (batches()[0],))
    fresh.load_state_dict(prepared.state_dict())
    x = batches()[0]
    assert torch.equal(convert_fx(fresh)(x), convert_fx(prepared)(x))


def test_what_is_put_in_the_place_of_an_observer_or_weight_counts() -> None:
    prepared = prepared_layers()
    prepared.activation_post_process_0 = HistogramObserver()
    prepared.activation_post_process_0(50 * batches()[0])
    assert float(convert_fx(prepared).program.plan.qparams["linear:in0"].scale) > 0.5
    holder: Any = prepared.get_submodule("2")
    holder.weight = nn.Parameter(torch.zeros(4, 16))
    made = convert_fx(prepared)(batches()[0])
    assert float((made - layers()[2].bias).abs().max()) < 0.02  # type: ignore[index]


def test_arguments_may_be_given_by_name() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, left: Tensor, right: Tensor) -> Any:
            return self.linear(left) + right

    model, (x, y) = Two().eval(), batches()[:2]
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x, y))
    assert torch.equal(prepared(right=y, left=x), prepared(x, right=y))
    quantized = convert_fx(prepared)
    assert torch.equal(quantized(x, right=y), quantized(x, y))
    with pytest.raises(InputError):
        prepared(x, wrong=y)


def test_a_prepared_model_is_not_pickled() -> None:
    with pytest.raises(SaveError, match="not pickled"):
        pickle.dumps(prepared_layers())


def test_copies_keep_the_attributes_that_are_preserved_and_own_them() -> None:
    model: Any = layers()
    model.labels = ["a"]
    custom = PrepareCustomConfig().set_preserved_attributes("labels")
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    twin = copy.deepcopy(prepared)
    twin.labels.append("b")
    assert prepared.labels == ["a"]
