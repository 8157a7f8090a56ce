"""Copies of a model: as it is, whatever it has kept of its calls, and back to that after it was traced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.flows.tracing.copies import changed_names, copy_model, take_back


class Keeps(nn.Module):
    """Counts and keeps what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.kept: list[Tensor] = []
        self.last: Tensor | None = None
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        made: Tensor = self.norm(self.fc(x))
        self.last = made
        self.kept.append(made)
        self.extra = "made in a call"
        return made


X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])


def test_tensors_with_a_history_are_copied_without_it() -> None:
    model = Keeps()
    model(X)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model)
    own: Any = copy_model(model)
    assert torch.equal(own.kept[0], model.kept[0])
    assert own.kept[0].grad_fn is None
    assert own.last is own.kept[0]
    assert own.fc.weight is not model.fc.weight
    assert own.fc.weight.requires_grad


def test_parameters_and_buffers_that_are_others_are_named() -> None:
    model = Keeps()
    own: Any = copy_model(model)
    assert changed_names(own, model) == frozenset()
    own.train()
    own(X)
    assert changed_names(own, model) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    with torch.no_grad():
        own.fc.weight[0, 0] += 1
    own.fc.bias = None
    assert {"fc.weight", "fc.bias"} <= changed_names(own, model)


def test_a_copy_that_was_run_is_as_the_model_again() -> None:
    model = Keeps().train()
    model(X)
    own: Any = copy_model(model)
    weight = own.fc.weight
    for _ in range(3):
        own(X)
    with torch.no_grad():
        own.fc.weight.zero_()
    own.another = 7
    take_back(own, model)
    assert changed_names(own, model) == frozenset()
    assert (own.calls, len(own.kept)) == (1, 1)
    assert not hasattr(own, "another")
    assert own.extra == model.extra
    assert own.fc.weight is weight
    assert (model.calls, len(model.kept)) == (1, 1)


def test_what_an_attribute_refers_to_in_the_model_is_that_of_the_copy() -> None:
    model: Any = Keeps()
    model.favourite, model.table = model.fc, {"weight": model.fc.weight, "mean": model.norm.running_mean}
    own: Any = copy_model(model)
    own.table = {}
    take_back(own, model)
    assert own.favourite is own.fc
    assert own.table["weight"] is own.fc.weight
    assert own.table["mean"] is own.norm.running_mean


def test_a_module_that_is_gone_is_passed_over() -> None:
    model = nn.Sequential(Keeps(), nn.ReLU())
    own: Any = copy_model(model)
    del own[1]
    own[0].calls = 5
    take_back(own, model)
    assert own[0].calls == 0
