"""Observers on a model, and fake quantizers in it: once, in the right mode, and only where something has a qconfig."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import quantc.nn.qat as nnqat
from quantc.flows import eager
from tests.support.eager_small import FUSE, Small, X, check, small, with_qconfig


def test_training_needs_training_mode_and_converting_eval_mode() -> None:
    model = with_qconfig(Small().train(), eager.get_default_qat_qconfig("fbgemm"))
    with pytest.raises(eager.EagerModeError) as caught:
        eager.prepare_qat(copy.deepcopy(model).eval())
    check(caught.value, "the model itself", "model.train()")
    learning = eager.prepare_qat(model)
    learning(X)
    with pytest.raises(eager.EagerModeError) as caught:
        eager.convert(learning)
    check(caught.value, "the model itself", "model.eval()")


def test_a_model_without_qconfigs_is_refused() -> None:
    with pytest.raises(eager.NothingQuantizedError, match="qconfig"):
        eager.prepare(Small().eval())


def test_a_model_is_prepared_once() -> None:
    prepared = eager.prepare(small())
    with pytest.raises(eager.AlreadyDoneError):
        eager.prepare(prepared)


def observed(model: nn.Module) -> list[str]:
    return [path.rpartition(".")[0] for path in eager.get_observer_dict(model)]


def test_layers_are_observed_in_a_copy_unless_asked() -> None:
    model = small()
    prepared = eager.prepare(model)
    assert observed(prepared) == ["quant", "conv", "fc"]
    assert observed(model) == []
    assert eager.prepare(model, inplace=True) is model
    assert observed(model) == ["quant", "conv", "fc"]


def test_only_classes_that_are_allowed_are_observed() -> None:
    model = with_qconfig(Small().eval())
    assert observed(eager.prepare(model, allow_list={eager.QuantStub, nn.Linear})) == ["quant", "fc"]


def test_modules_that_are_no_leaves_are_observed_if_asked() -> None:
    model = with_qconfig(nn.Sequential(eager.QuantStub(), nn.Sequential(nn.Linear(2, 2))).eval())
    assert observed(eager.prepare(model)) == ["0", "1.0"]
    assert observed(eager.prepare(model, observer_non_leaf_module_list=[nn.Sequential])) == ["0", "1"]


def test_qconfigs_on_nothing_that_can_be_quantized_are_refused() -> None:
    with pytest.raises(eager.NothingQuantizedError, match="class") as caught:
        eager.prepare(with_qconfig(nn.ReLU().eval()))
    assert "ReLU" in str(caught.value.where)


def test_a_model_for_training_rounds_its_weights_and_results() -> None:
    torch.manual_seed(0)
    model = with_qconfig(eager.fuse_modules_qat(Small().train(), FUSE), eager.get_default_qat_qconfig("fbgemm"))
    learning: Any = eager.prepare_qat(model)
    assert type(learning.fc) is nnqat.Linear
    assert {"quant", "conv", "fc"} <= set(observed(learning))
    assert len(learning.fc(torch.randn(64, 4)).unique()) <= 128
    assert learning.fc.weight_fake_quant(learning.fc.weight).unique().numel() <= 255
    assert type(model.get_submodule("fc")) is nn.Linear


def test_a_table_of_the_callers_own_says_what_is_trained() -> None:
    model = with_qconfig(nn.Sequential(eager.QuantStub(), nn.Linear(2, 2), nn.Conv2d(2, 2, 1)))
    vars(model)["qconfig"] = eager.get_default_qat_qconfig("fbgemm")
    learning: Any = eager.prepare_qat(model, {nn.Linear: nnqat.Linear})
    assert [type(layer) for layer in learning[1:]] == [nnqat.Linear, nn.Conv2d]


def test_a_model_in_eval_mode_is_trained_if_it_is_meant() -> None:
    model = with_qconfig(Small().eval(), eager.get_default_qat_qconfig("fbgemm"))
    with pytest.warns(eager.EagerWarning, match="mode"):
        assert isinstance(eager.prepare_qat(model, accept="mode").get_submodule("fc"), nnqat.Linear)
