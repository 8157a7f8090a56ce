"""Base class of modules that run outside torch: it cannot be trained, and tells what it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import ModeError
from quantc.ir.program import Program
from quantc.targets.deployed_module import Deployed
from tests.support.by_hand import two_layers


class Runtime(Deployed):
    """The least that a deployed module has to say of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    @property
    def program(self) -> Program:
        return two_layers()

    @property
    def headline(self) -> str:
        return "two layers, deployed"

    def to_data(self) -> dict[str, Any]:
        return {"name": "größe", "bytes": 12}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made


def test_training_is_refused_and_changes_nothing() -> None:
    module = Runtime().eval()
    with pytest.raises(ModeError, match="two layers, deployed: it cannot be trained") as caught:
        module.train()
    assert "quantize it again" in str(caught.value.advice)
    assert caught.value.where == two_layers().name
    assert not module.training
    assert not module.inner.training


def test_eval_reaches_what_is_inside_and_gives_the_module_back() -> None:
    module = Runtime()
    assert module.inner.training
    assert module.train(False) is module
    assert module.eval() is module
    assert not any(part.training for part in module.modules())
    assert torch.equal(module(torch.ones(9)), torch.ones(9))


def test_json_is_what_the_data_is_with_letters_as_they_are() -> None:
    text = Runtime().to_json()
    assert json.loads(text) == {"name": "größe", "bytes": 12}
    assert "größe" in text


def test_the_text_names_the_class_and_what_it_runs() -> None:
    assert repr(Runtime()) == "<Runtime two layers, deployed>"
