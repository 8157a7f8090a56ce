"""The checks of the eager flow: reused layers, missing stubs, layers without data, modes, qconfigs without effect."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.flows import eager
from quantc.nn.quantized import FloatFunctional
from tests.support.eager_models import CASES, QUANTC, names
from tests.support.eager_small import Small, Twice, check, run, small, with_qconfig


def prepared_twice() -> nn.Module:
    prepared = eager.prepare(with_qconfig(Twice().eval()))
    prepared(torch.randn(2, 4))
    return prepared


def test_a_layer_that_runs_twice_is_refused_and_a_relu_is_not() -> None:
    with pytest.raises(eager.ReusedLayerError) as caught:
        eager.convert(prepared_twice())
    check(caught.value, "fc", "ran 2 times", "accept='reused-layer'")
    assert [fault.path for fault in caught.value.faults] == ["fc"]


def test_a_layer_that_runs_once_in_each_of_two_calls_is_no_reuse() -> None:
    prepared = eager.prepare(small())
    run(prepared)
    run(prepared)
    eager.convert(prepared)


def test_a_reused_layer_can_be_accepted() -> None:
    with pytest.warns(eager.EagerWarning, match="fc"):
        converted = eager.convert(prepared_twice(), accept="reused-layer")
    assert type(converted.get_submodule("fc")).__name__ == "Linear"


def test_one_functional_module_for_two_sums_is_a_reuse() -> None:
    class TwoSums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.add = eager.QuantStub(), eager.DeQuantStub(), FloatFunctional()

        def forward(self, x: Tensor) -> Any:
            q = self.quant(x)
            return self.dequant(self.add.add(self.add.add(q, q), q))

    prepared = run(eager.prepare(with_qconfig(TwoSums().eval())))
    with pytest.raises(eager.ReusedLayerError) as caught:
        eager.convert(prepared)
    check(caught.value, "add", "FloatFunctional")


def test_one_module_under_two_names_is_refused_before_anything_is_done() -> None:
    model: Any = small()
    model.head = model.fc
    with pytest.raises(eager.ReusedLayerError) as caught:
        eager.prepare(model)
    check(caught.value, "fc", "fc, head", "deepcopy")
    model.head = copy.deepcopy(model.fc)
    eager.prepare(model)


def test_without_a_quant_stub_prepare_refuses() -> None:
    model = with_qconfig(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval())
    with pytest.raises(eager.MissingStubError) as caught:
        eager.prepare(model)
    check(caught.value, "0", "QuantStub")


def test_converting_without_data_is_refused_and_names_every_layer() -> None:
    with pytest.raises(eager.NotObservedError) as caught:
        eager.convert(eager.prepare(small()))
    check(caught.value, "quant, conv, fc", "not run on data")


def test_layers_that_no_data_reached_are_named() -> None:
    class Branch(Small):
        def forward(self, x: Tensor) -> Any:
            q = self.quant(x)
            return self.dequant(self.conv(q) if x.sum() > -1e9 else self.fc(q))

    model = with_qconfig(Branch().eval())
    prepared = run(eager.prepare(model))
    with pytest.raises(eager.NotObservedError) as caught:
        eager.convert(prepared)
    check(caught.value, "fc", "in 1 runs")
    assert "conv" not in str(caught.value.where)


def test_preparing_in_training_mode_is_refused() -> None:
    with pytest.raises(eager.EagerModeError) as caught:
        eager.prepare(small().train())
    check(caught.value, "the model itself", "prepare_qat")


def test_a_part_in_training_mode_is_named() -> None:
    model: Any = small()
    model.fc.train()
    with pytest.raises(eager.EagerModeError) as caught:
        eager.prepare(model)
    check(caught.value, "fc", "eval mode, but fc")


def test_a_qconfig_where_nothing_can_be_quantized_is_refused() -> None:
    model: Any = small()
    model.relu.qconfig = eager.default_qconfig
    with pytest.raises(eager.NoEffectError) as caught:
        eager.prepare(model)
    check(caught.value, "relu")


@pytest.mark.parametrize("name", ["residual", "branches", "gate", "scalars"])
def test_sound_models_give_no_warning(name: str) -> None:
    case = CASES[name]
    fuse = case.fuse + (names("1.down 1.relu") if name == "gate" else [])
    model = eager.fuse_modules(case.made(QUANTC).eval(), fuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error", eager.EagerWarning)
        prepared = eager.prepare(with_qconfig(model))
        for batch in case.data():
            prepared(batch)
        eager.convert(prepared)
