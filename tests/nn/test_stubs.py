"""Where quantized parts of a model begin and end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.nn.qconfig import default_qconfig
from quantc.nn.stubs import DeQuantStub, QuantStub, QuantWrapper


@pytest.mark.parametrize("kind", [QuantStub, DeQuantStub])
def test_a_stub_hands_on_what_it_is_given_and_has_nothing_to_save(kind: Any) -> None:
    stub, given = kind(default_qconfig), {"x": torch.ones(2)}
    assert stub(given) is given
    assert stub.state_dict() == {}


@pytest.mark.parametrize("kind", [QuantStub, DeQuantStub])
def test_a_stub_has_a_qconfig_only_if_it_was_given_one(kind: Any) -> None:
    assert kind(default_qconfig).qconfig is default_qconfig
    assert not hasattr(kind(), "qconfig")  # so that it takes that of the module around it


def test_a_wrapper_computes_what_the_module_does_between_two_stubs() -> None:
    torch.manual_seed(0)
    inner = nn.Linear(3, 2)
    vars(inner)["qconfig"] = default_qconfig
    order: list[str] = []
    wrapped = QuantWrapper(inner)
    for name, module in wrapped.named_children():
        module.register_forward_hook(lambda *_, name=name: order.append(name))
    x = torch.randn(4, 3)
    assert torch.equal(wrapped(x), inner(x))
    assert order[:3] == ["quant", "module", "dequant"]
    assert vars(wrapped.quant)["qconfig"] is vars(wrapped.dequant)["qconfig"] is default_qconfig


@pytest.mark.parametrize("training", [True, False])
def test_a_wrapper_is_in_the_mode_of_its_module(training: bool) -> None:
    wrapped = QuantWrapper(nn.ReLU().train(training))
    assert [part.training for part in wrapped.modules()] == [training] * 4
