"""Copies of a model: shared or copied tensors, ties kept, and what cannot be copied shared."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.capture.model_copies import Tensors, cloned_inputs, copied_module, twin


class Tied(nn.Module):
    """Parameters, a buffer and plain attributes that refer to one another."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight = self.a.weight
        self.b.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros(1))
        self.table = {"w": self.a.weight, "plain": torch.ones(2)}
        self.again = self.a
        self.notes: list[int] = []
        self.same = {"notes": self.notes}


class Locked(Tied):
    """The same with an object that refuses to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("kind", [Tied, Locked])
def test_a_copy_with_shared_tensors_holds_the_very_tensors(kind: type[Tied]) -> None:
    model = kind()
    made: Any = twin(model, Tensors.SHARED)
    assert type(made) is kind
    assert made.a.weight is model.a.weight
    assert made.count is model.count
    assert made.table["plain"] is model.table["plain"]
    assert made.a is not model.a
    made.notes.append(1)
    assert model.notes == []


@pytest.mark.parametrize("kind", [Tied, Locked])
def test_a_copy_with_copied_tensors_writes_to_its_own_and_keeps_ties(kind: type[Tied]) -> None:
    model = kind()
    made: Any = twin(model, Tensors.COPIED)
    assert made.b.weight is made.a.weight is made.table["w"]
    assert made.again is made.a
    assert made.same["notes"] is made.notes
    assert isinstance(made.a.weight, nn.Parameter)
    assert (made.a.bias.requires_grad, made.b.bias.requires_grad) == (True, False)
    before = model.a.weight.detach().clone()
    with torch.no_grad():
        made.a.weight.zero_()
        made.count.add_(1)
        made.table["plain"].zero_()
    assert torch.equal(model.a.weight, before)
    assert float(model.count) == 0
    assert float(model.table["plain"].sum()) == 2


def test_what_refuses_to_be_copied_is_shared_and_nothing_else() -> None:
    model = Locked()
    made: Any = twin(model, Tensors.COPIED)
    assert made.lock is model.lock
    assert made.notes is not model.notes


def test_what_is_known_already_is_not_copied_again() -> None:
    model, weight = Tied(), nn.Parameter(torch.full((2, 2), 7.0))
    made: Any = copied_module(model, {id(model.a.weight): weight})
    assert made.a.weight is weight
    assert made.table["w"] is weight


def test_inputs_are_cloned_apart_with_their_gradients_asked_for() -> None:
    x = torch.ones(2, requires_grad=True)
    given = (x, [x, 3], {"k": x.detach()})
    first, (second, number), named = cloned_inputs(given)
    assert number == 3
    assert first is not second
    assert (first.requires_grad, first.is_leaf, named["k"].requires_grad) == (True, True, False)
    with torch.no_grad():
        first.zero_()
    assert float(x.detach().sum()) == float(second.detach().sum()) == 2


def test_lazy_parameters_stay_as_they_are() -> None:
    model = nn.LazyLinear(2)
    made: Any = twin(model, Tensors.COPIED)
    assert made.weight is model.weight
