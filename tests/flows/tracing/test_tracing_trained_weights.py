"""Weights that are replaced or loaded while a model of the tracing flow is trained: it goes on with those that it has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import InputError
from quantc.flows.tracing import convert, prepare
from tests.support.traced_weights import CHANGED, Net, images


def give(model: Any, other: nn.Module) -> None:
    """Put the parameters and buffers of another model in the place of a model's own."""
    for name, parameter in other.named_parameters():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, nn.Parameter(parameter.detach().clone()))
    for name, buffer in other.named_buffers():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer.clone())


WAYS: dict[str, Callable[[Any, nn.Module, Any], Any]] = {
    "replaced": lambda model, other, _: give(model, other),
    "loaded": lambda model, _, trained: model.load_state_dict(trained.state_dict()),
    "assigned": lambda model, _, trained: model.load_state_dict(copy.deepcopy(trained.state_dict()), assign=True),
    "floats, loaded": lambda model, other, _: model.load_state_dict(other.state_dict(), strict=False),
    "floats, assigned": lambda model, other, _: model.load_state_dict(
        copy.deepcopy(other.state_dict()), strict=False, assign=True
    ),
}


@pytest.mark.parametrize("when", ["before a call", "after a call", "in a copy"])
@pytest.mark.parametrize("how", WAYS)
def test_training_goes_on_with_the_weights_that_the_model_has(how: str, when: str) -> None:
    torch.manual_seed(0)
    model: Any = prepare(Net(), images(), qat=True)
    torch.manual_seed(1)
    other, x = Net(), images()
    trained: Any = prepare(other, images(), qat=True)
    if when == "after a call":
        model(x)
    model = copy.deepcopy(model) if when == "in a copy" else model
    WAYS[how](model, other, trained)
    if when == "after a call":  # ranges have moved: those of the other are taken
        rows = {name: row for name, row in trained.state_dict().items() if "_fake_quantizers" in name}
        model.load_state_dict(rows, strict=False)
    with torch.enable_grad():
        found, expected = model(x), trained(x)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
    for name, _ in other.named_parameters():
        assert torch.equal(model.get_parameter(name).grad, trained.get_parameter(name).grad), name
    assert torch.equal(convert(model)(x), convert(trained)(x))


def test_weights_that_are_replaced_in_a_call_of_training_are_refused() -> None:
    class Replaces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.is_on = nn.Conv2d(4, 4, 1), False

        def forward(self, x: Tensor) -> Any:
            made = self.conv(x)
            if self.is_on:
                self.conv.weight = nn.Parameter(self.conv.weight * 2)
            return made

    model: Any = prepare(Replaces(), images(), qat=True)
    model(images())
    model.is_on = True
    with pytest.raises(InputError, match=CHANGED):
        model(images())
