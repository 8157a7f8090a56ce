"""Which module a node of an exported graph comes from."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from quantc.errors import ConfigError
from quantc.flows.pt2e.module_stacks import modules_around, paths_of_type
from tests.support.pt2e_quantizers import exported


class Block(nn.Sequential):
    pass


def graph() -> fx.Graph:
    model = nn.Sequential(Block(nn.Linear(2, 2), nn.ReLU()), Block(nn.Linear(2, 2)))
    found: fx.Graph = exported(model, (torch.ones(1, 2),)).graph
    return found


def test_modules_come_from_the_outermost_to_the_layer() -> None:
    relu = next(node for node in graph().nodes if node.target is torch.ops.aten.relu.default)
    assert [(path, kind.rpartition(".")[2]) for path, kind in modules_around(relu)] == [
        ("", "Sequential"),
        ("0", "Block"),
        ("0.1", "ReLU"),
    ]


def test_classes_are_known_as_text_and_as_themselves() -> None:
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"a": ("L['self'].part", nn.Linear), "b": ("part.0", "torch.nn.ReLU")}
    assert list(modules_around(node)) == [
        ("part", "torch.nn.modules.linear.Linear"),
        ("part.0", "torch.nn.ReLU"),
    ]
    assert list(modules_around(fx.Graph().placeholder("x"))) == []


def test_modules_of_a_class_are_found_where_they_are() -> None:
    assert paths_of_type(graph(), Block) == ["0", "1"]
    assert paths_of_type(graph(), nn.Linear) == ["0.0", "1.0"]


def test_a_class_that_the_model_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(ConfigError, match="GELU") as caught:
        paths_of_type(graph(), nn.GELU)
    assert "ReLU" in str(caught.value.advice)
    with pytest.raises(ConfigError, match="Module"):
        paths_of_type(graph(), nn.Module)
