"""Alias classes of a graph, and which writes are seen through another name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from quantc.ir.alias_analysis import LEAVES_INPUTS_ALONE, Aliasing, gives_shape, in_place_operand, operands_written
from quantc.ir.graph_tree import attribute
from tests.support.programs import exported

aten = torch.ops.aten


def chain(*steps: tuple[Any, ...]) -> tuple[fx.Graph, list[fx.Node]]:
    """A graph of one input and a call for each step `(target, *arguments)`; an int in a tuple `(i,)` is node i."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for target, *given in steps:
        args = tuple(nodes[item[0]] if isinstance(item, tuple) else item for item in given)
        nodes.append(graph.call_function(target, args))
    return graph, nodes


X = (0,)


# -- one node ----------------------------------------------------------------------------------------------------------


def test_written_are_the_operands_whose_memory_changes() -> None:
    graph, (x, relu, in_place) = chain((aten.relu.default, X), (aten.relu_.default, (1,)))
    out = graph.call_function(aten.add.out, (x, relu), {"out": in_place})
    shape = graph.call_function(getattr, (x, "shape"))
    function = graph.call_function(torch.nn.functional.relu, (x,))
    assert operands_written(relu) == []
    assert operands_written(in_place) == [relu]
    assert operands_written(out) == [in_place]
    assert operands_written(shape) == []
    assert operands_written(function) == [x], "a Python function may write to anything"
    assert operands_written(x) == []


@pytest.mark.parametrize("training", [True, False])
def test_a_norm_that_trains_writes_its_running_statistics(training: bool) -> None:
    graph = fx.Graph()
    x, mean, var = (graph.placeholder(name) for name in ("x", "mean", "var"))
    norm = graph.call_function(aten.batch_norm.default, (x, None, None, mean, var, training, 0.1, 1e-5, False))
    assert operands_written(norm) == ([mean, var] if training else [])
    values = [torch.randn(4, 2), torch.zeros(2), torch.ones(2)]
    aten.batch_norm.default(values[0], None, None, values[1], values[2], training, 0.1, 1e-5, False)
    assert torch.equal(values[1], torch.zeros(2)) != training, "torch does what is said here"


def test_an_opaque_module_writes_unless_it_is_marked() -> None:
    graph, root = fx.Graph(), nn.Module()
    root.layer = nn.Linear(2, 2)
    x = graph.placeholder("x")
    node = graph.call_module("layer", (x,))
    assert operands_written(node, root) == [x]
    root.layer.__dict__[LEAVES_INPUTS_ALONE] = True
    assert operands_written(node, root) == []
    assert operands_written(node) == [x]


def test_the_operand_that_comes_back_is_the_one_written_to() -> None:
    _, (x, relu, in_place, shaped) = chain(
        (aten.relu.default, X), (aten.relu_.default, (1,)), (aten.unsqueeze_.default, (1,), 0)
    )
    assert (in_place_operand(relu), in_place_operand(in_place), in_place_operand(x)) == (None, relu, None)
    assert (gives_shape(shaped), gives_shape(in_place)) == (True, False)


# -- classes -----------------------------------------------------------------------------------------------------------


def test_views_are_of_one_class_and_copies_of_their_own() -> None:
    graph, (x, relu, view, turned, clone) = chain(
        (aten.relu.default, X), (aten.view.default, (1,), [4]), (aten.t.default, (2,)), (aten.clone.default, (2,))
    )
    graph.output((turned, view, clone))
    found = Aliasing(graph)
    assert found.root(turned) is found.root(view) is found.root(relu)
    assert len({found.root(node) for node in (x, relu, clone)}) == 3
    assert [found.returned(node) for node in (x, relu, clone)] == [0, 2, 1]
    assert [found.is_external(node) for node in (x, relu, view)] == [True, False, False]


def test_a_write_is_seen_if_another_name_of_the_memory_is_read_later() -> None:
    first = (aten.relu.default, X), (aten.view.default, (1,), [4]), (aten.neg_.default, (1,))
    graph, nodes = chain(*first, (aten.tanh.default, (2,)))
    assert Aliasing(graph).seen == {nodes[3]}
    graph, nodes = chain(*first, (aten.tanh.default, (3,)), (aten.tanh.default, (1,)))
    assert Aliasing(graph).seen == set(), "the tensor itself and the result are its names, not others"
    graph, nodes = chain(first[0], first[1], (aten.tanh.default, (2,)), (aten.neg_.default, (1,)))
    assert Aliasing(graph).seen == set(), "read before the write, not after"


def test_a_write_that_reads_another_name_itself_is_not_seen() -> None:
    graph, _ = chain((aten.relu.default, X), (aten.view.default, (1,), [4]), (aten.add_.Tensor, (1,), (2,)))
    assert Aliasing(graph).seen == set()


def test_results_of_writes_are_names_of_what_is_written() -> None:
    graph, _ = chain(
        (aten.relu.default, X),
        (aten.neg_.default, (1,)),
        (aten.neg_.default, (2,)),
        (aten.tanh.default, (1,)),
        (aten.tanh.default, (2,)),
    )
    assert Aliasing(graph).seen == set()


def test_writes_to_inputs_and_through_them_are_seen() -> None:
    graph, nodes = chain((aten.view.default, X, [4]), (aten.neg_.default, (1,)))
    assert Aliasing(graph).seen == {nodes[2]}
    graph, nodes = chain((aten.unsqueeze_.default, X, 0))
    assert Aliasing(graph).seen == set(), "the shape is of the name, not of the memory"


def test_writes_are_known_by_what_they_reach_and_when() -> None:
    graph, (x, relu, view, neg, tanh) = chain(
        (aten.relu.default, X), (aten.view.default, (1,), [4]), (aten.neg_.default, (2,)), (aten.tanh.default, (1,))
    )
    found = Aliasing(graph)
    assert found.has_writes
    assert [found.is_written(node) for node in (x, relu, view, tanh)] == [False, True, True, False]
    assert found.writers(relu) == [neg]
    assert found.is_written_after(relu, view)
    assert not found.is_written_after(relu, neg)
    assert not found.is_written_after(x, x)
    assert not Aliasing(chain((aten.relu.default, X))[0]).has_writes


def test_inputs_may_be_one_tensor_once_one_is_written_to() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((y,))
    assert Aliasing(graph).root(x) is not Aliasing(graph).root(y)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.neg_.default, (x,))
    found = Aliasing(graph)
    assert found.root(x) is found.root(y)
    assert found.is_written(y)
    assert found.returned(x) == 1


def test_a_replacement_joins_the_class_of_what_it_replaces() -> None:
    graph, (_, relu, view) = chain((aten.relu.default, X), (aten.view.default, (1,), [4]))
    found = Aliasing(graph)
    flat = graph.call_function(aten.clone.default, (relu,))
    new = graph.call_function(aten.reshape.default, (flat, [4]))
    assert found.learn(new, view) == [flat]
    assert found.root(new) is found.root(view)
    assert found.root(flat) is not found.root(relu)


# -- nested graphs -----------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = torch.cond(x.sum() > 0, torch.add, torch.sub, (x, y))
        return chosen


def test_a_call_of_graphs_writes_what_they_write() -> None:
    program = exported(Branches(), [torch.ones(2), torch.ones(2)])
    cond = program.node("cond")
    x, y = program.node("x"), program.node("y")
    assert operands_written(cond, program.root) == []
    assert {x, y} <= set(operands_written(cond)), "unknown graphs may write to anything"
    inner = attribute(program.root, "true_graph_0").graph
    second = inner.find_nodes(op="placeholder")[1]
    with inner.inserting_before(inner.output_node()):
        neg = inner.call_function(aten.neg_.default, (second,))
    given = list(cond.args[3])  # type: ignore[arg-type]
    assert set(operands_written(cond, program.root)) == set(given), "both, for a caller may pass one tensor twice"
    inner.erase_node(neg)
    assert operands_written(cond, program.root) == []
