"""Switching exported models between training and inference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.flows.pt2e import (
    allow_exported_model_train_eval,
    model_is_exported,
    move_exported_model_to_eval,
    move_exported_model_to_train,
)
from quantc.flows.pt2e.export_utils import MODES


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=0.3, eps=0.2)
        self.drop = nn.Dropout(0.7)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.norm(x))


def test_modes_follow_the_model() -> None:
    torch.manual_seed(0)
    given, x = Dropping(), torch.randn(6, 4)
    module: Any = torch.export.export(given.train(), (x,)).module()
    assert model_is_exported(module)
    assert not model_is_exported(given)
    move_exported_model_to_eval(module)
    given.load_state_dict(module.state_dict())
    assert torch.equal(module(x), given.eval()(x))
    move_exported_model_to_train(module)
    torch.manual_seed(1)
    found = module(x)
    torch.manual_seed(1)
    assert torch.equal(found, given.train()(x))
    allow_exported_model_train_eval(module)
    module.eval()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_switching_is_seen_in_the_ops_that_have_a_mode() -> None:
    class Several(nn.Module):
        def forward(self, x: Tensor) -> Any:
            x = nn.functional.dropout(x, 0.5, self.training)
            x = nn.functional.alpha_dropout(x, 0.5, self.training)
            return nn.functional.rrelu(x, 0.1, 0.3, self.training)

    module: Any = torch.export.export(Several().train(), (torch.ones(3, 4),)).module()

    def modes() -> list[bool]:
        places = {node.name: MODES[node.target] for node in module.graph.nodes if node.target in MODES}
        return [node.args[places[node.name]] for node in module.graph.nodes if node.name in places]

    assert modes() == [True, True, True]
    assert move_exported_model_to_eval(module) is module
    assert modes() == [False, False, False]
    assert not module.training
    move_exported_model_to_train(module)
    assert modes() == [True, True, True]


def test_models_that_are_not_exported_are_refused() -> None:
    for move in (move_exported_model_to_eval, move_exported_model_to_train):
        with pytest.raises(ValueError, match="Dropping"):
            move(Dropping())  # type: ignore[arg-type]
    assert not model_is_exported(fx.symbolic_trace(nn.ReLU()))


def test_train_takes_a_mode_where_it_is_allowed() -> None:
    module: Any = torch.export.export(Dropping().train(), (torch.ones(3, 4),)).module()
    assert allow_exported_model_train_eval(module) is module
    assert module.train(False) is module
    assert torch.equal(module(torch.ones(3, 4)), module(torch.ones(3, 4)))
