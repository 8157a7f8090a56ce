"""The graphs of a model, outermost first, and who owns what they refer to."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from quantc.errors import QuantcError
from quantc.ir.graph_tree import GraphTree, attribute
from tests.support.programs import Choice, aten, exported


def nested() -> fx.GraphModule:
    """A graph module of one relu."""
    graph = fx.Graph()
    graph.output((graph.call_function(aten.relu.default, (graph.placeholder("a"),)),))
    return fx.GraphModule(nn.Module(), graph)


def test_nested_graphs_come_after_the_ones_that_hold_them() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    paths = [path for path, _ in program.graphs()]
    assert paths == [
        "",
        "true_graph_0",
        "false_graph_0",
        "true_graph_0/true_graph_0",
        "true_graph_0/false_graph_0",
    ]
    assert sum(len(graph.nodes) for _, graph in program.graphs()) == len(list(program.nodes()))


def test_a_graph_that_is_referred_to_twice_is_given_once() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.one = nested()
    root.two = root.one
    graph.create_node("get_attr", "one")
    graph.create_node("get_attr", "two")
    graph.create_node("get_attr", "missing")
    graph.output(())
    assert [path for path, _ in GraphTree(graph, root).graphs()] == ["", "one"]


def test_owners_are_the_root_and_the_modules_of_nested_graphs() -> None:
    root, graph = nn.Module(), fx.Graph()
    inner = nested()
    root.inner = inner
    graph.create_node("get_attr", "inner")
    graph.output(())
    tree = GraphTree(graph, root)
    assert tree.owner(graph) is root
    assert tree.owner(inner.graph) is inner
    with pytest.raises(QuantcError, match="nested graph"):
        tree.owner(fx.Graph())


def test_targets_are_followed_part_by_part() -> None:
    root = nn.Module()
    root.a = nn.Linear(2, 3)
    assert attribute(root, "a") is root.a
    assert attribute(root, "a.weight") is root.a.weight
    for missing in ("b", "a.nothing", "a.weight.nothing", "b.weight"):
        assert attribute(root, missing) is None
