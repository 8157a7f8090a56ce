"""The index between nodes and sites: operands are counted as they are written, with repetitions."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from quantc.errors import UnknownNameError
from quantc.ir.program import Program
from quantc.ir.site_index import Places, after, operand_nodes, outputs_of, rewire
from quantc.ir.sites import Site
from tests.support.programs import Builder, Choice, aten, exported


def joined() -> tuple[Program, list[fx.Node]]:
    """cat([x, relu, x]), then the sum of that with itself."""
    build = Builder()
    x = build.input("x", 2, 4)
    relu = build.call(aten.relu.default, x)
    cat = build.call(aten.cat.default, [x, relu, x], 1)
    summed = build.call(aten.add.Tensor, cat, cat, alpha=2)
    return build.program(summed), [x, relu, cat, summed]


def test_operands_are_counted_in_lists_and_with_repetitions() -> None:
    program, (x, relu, cat, summed) = joined()
    assert operand_nodes(cat) == (x, relu, x)
    assert operand_nodes(summed) == (cat, cat)
    places = Places(program)
    assert [places.value(places.use(cat, index)) for index in range(3)] == [x, relu, x]
    assert places.value(places.out(cat)) is cat


def test_keywords_come_last() -> None:
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    call = graph.call_function(torch.addmm, (c,), {"mat1": a, "mat2": [b, 3]})
    assert operand_nodes(call) == (c, a, b)


def test_consumers_are_listed_with_the_operand_they_read() -> None:
    program, (x, relu, cat, summed) = joined()
    places = Places(program)
    assert places.reads(x) == [(relu, 0), (cat, 0), (cat, 2)]
    assert places.reads(cat) == [(summed, 0), (summed, 1)]
    assert places.reads(summed) == [(program.graph.output_node(), 0)]
    assert places.reads(program.graph.output_node()) == []


def test_rewiring_replaces_the_numbered_operands_alone() -> None:
    program, (x, relu, cat, summed) = joined()
    before = program.module
    rewire(program, cat, {2: relu})
    assert operand_nodes(cat) == (x, relu, relu)
    assert cat.args[1] == 1
    rewire(program, summed, {0: x})
    assert (operand_nodes(summed), summed.kwargs) == ((x, cat), {"alpha": 2})
    assert program.module is not before


def test_a_consumer_goes_after_inputs_and_constants_and_before_the_first_use() -> None:
    build = Builder()
    x, y = build.input("x", 2), build.input("y", 2)
    w = build.constant("w", torch.ones(2))
    relu = build.call(aten.relu.default, y)
    tanh = build.call(aten.tanh.default, relu)
    mul = build.call(aten.mul.Tensor, x, w)
    build.program(build.call(aten.add.Tensor, build.call(aten.add.Tensor, tanh, mul), w))
    assert after(x) is relu
    assert after(relu) is tanh
    assert after(w) is mul


def test_a_node_of_several_outputs_has_its_items() -> None:
    build = Builder()
    parts = build.call(aten.split.Tensor, build.input("x", 4), 2)
    items = [build.call(operator.getitem, parts, index) for index in (1, 0)]
    build.program(*items)
    assert list(outputs_of(parts)) == items
    assert list(outputs_of(items[0])) == [items[0]]


def test_sites_of_nested_graphs_have_their_path() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    places = Places(program)
    inner = next(graph for path, graph in program.graphs() if path == "false_graph_0")
    sub = next(node for node in inner.nodes if node.op == "call_function")
    assert places.use(sub, 1) == Site("false_graph_0", sub.name, operand=1)
    assert places.node(places.out(sub)) is sub
    assert places.value(places.use(sub, 1)) is sub.args[1]


def test_sites_that_are_not_there_are_refused() -> None:
    program, _ = joined()
    places = Places(program)
    with pytest.raises(UnknownNameError, match="rellu:out0") as caught:
        places.node(Site("", "rellu", out=0))
    assert caught.value.advice is not None
    assert "relu" in caught.value.advice
    with pytest.raises(UnknownNameError, match="cat has 3 operands, and cat:in3"):
        places.value(Site("", "cat", operand=3))
