"""Quantized modules in the place of float ones: what is swapped, what is kept, and what is refused."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import QuantcError
from quantc.flows import eager
from quantc.nn.quantized import FloatFunctional
from tests.support.eager_small import FUSE, Small, X, check, hooks, run, small, with_qconfig


def test_one_module_under_two_names_is_swapped_at_both_if_it_is_meant() -> None:
    model: Any = small()
    model.head = model.fc
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted: Any = eager.convert(run(eager.prepare(model, accept="reused-layer")), accept="reused-layer")
    assert converted.head is converted.fc
    assert type(converted.fc).__name__ == "Linear"
    assert not isinstance(converted.fc, nn.Linear)


def test_layers_that_could_be_fused_are_listed_ready_to_paste() -> None:
    prepared = run(eager.prepare(with_qconfig(Small().eval())))
    with pytest.warns(eager.UnfusedWarning) as caught:
        eager.convert(prepared)
    assert str(FUSE) in str(caught[0].message)
    fused = run(eager.prepare(small()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", eager.UnfusedWarning)
        eager.convert(fused)


def test_a_functional_module_without_data_refuses_when_it_is_used() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant, self.add = eager.QuantStub(), eager.DeQuantStub(), FloatFunctional()

        def forward(self, x: Tensor) -> Any:
            q = self.quant(x)
            return self.dequant(self.add.add(q, q) if len(x) > 2 else self.add.mul_scalar(q, 2.0))

    converted = eager.convert(run(eager.prepare(with_qconfig(Sometimes().eval()))))
    assert converted(X).shape == X.shape
    with pytest.raises(eager.NotObservedError) as caught:
        converted(torch.cat([X, X]))
    check(caught.value, "add", "no scale")


def test_statistics_that_were_loaded_are_data() -> None:
    calibrated = run(eager.prepare(small()))
    fresh = eager.prepare(small())
    fresh.load_state_dict(calibrated.state_dict())
    assert torch.equal(eager.convert(fresh)(X), eager.convert(calibrated)(X))


def test_a_model_of_which_nothing_is_quantized_is_refused() -> None:
    with pytest.raises(eager.NothingQuantizedError):
        eager.convert(Small().eval())
    with pytest.raises(eager.NothingQuantizedError, match="no layer"):
        eager.quantize_dynamic(nn.Sequential(nn.ReLU()))
    with pytest.raises(eager.NothingQuantizedError, match="in place"):
        eager.quantize_dynamic(nn.Linear(4, 4), inplace=True)


def test_reference_modules_are_programs() -> None:
    prepared = run(eager.prepare(small()))
    with pytest.raises(QuantcError, match="Program") as caught:
        eager.convert(prepared, is_reference=True)
    assert "to_program" in str(caught.value.advice)


def test_a_converted_model_keeps_no_hooks_and_no_qconfigs() -> None:
    prepared = run(eager.prepare(small()))
    assert hooks(prepared)
    converted = eager.convert(prepared)
    assert hooks(converted) == 0
    assert not any(hasattr(module, "qconfig") for module in converted.modules())
    assert hooks(prepared), "the prepared model is not changed"


def test_the_callers_model_is_not_changed() -> None:
    model = small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    eager.convert(run(eager.prepare(model)))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert hooks(model) == 0


def test_a_quantized_model_is_saved_and_loaded() -> None:
    converted = eager.convert(run(eager.prepare(small())))
    file = io.BytesIO()
    torch.save(converted.state_dict(), file)
    file.seek(0)
    fresh = eager.convert(run(eager.prepare(small())))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(X), converted(X))
