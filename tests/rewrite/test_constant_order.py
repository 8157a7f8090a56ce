"""Constants behind the inputs, in order of use, each once; and none that nobody reads."""

from __future__ import annotations

import torch
from torch import fx, nn

from quantc.ir.program import Program
from quantc.rewrite.constant_order import forget_unread, order_constants
from tests.support.programs import aten, signature_of, small_net


def shuffled() -> Program:
    """((x * b) * a) * b, where `a` and `same` are one tensor, and constants stand between the calls."""
    root, graph = nn.Module(), fx.Graph()
    root.a, root.b = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0]))
    root.same, root.unread = root.a, nn.Parameter(torch.tensor([9.0]))
    root.register_buffer("left", torch.zeros(1))
    graph.create_node("get_attr", "unread")
    second = graph.create_node("get_attr", "same")
    x = graph.placeholder("x")
    first = graph.create_node("get_attr", "b")
    one = graph.call_function(aten.mul.Tensor, (x, first))
    two = graph.call_function(aten.mul.Tensor, (one, second))
    again = graph.create_node("get_attr", "b")
    graph.output((graph.call_function(aten.mul.Tensor, (two, again)),))
    return Program(graph, root, signature_of(graph, 1))


def head(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op in ("placeholder", "get_attr")]


def test_constants_are_sorted_by_first_use_and_tensors_have_one_name() -> None:
    program = shuffled()
    before = program(torch.ones(1))
    done = order_constants(program, program.graph)
    assert dict(done) == {"constants merged": 1, "constants renamed": 1, "constants moved": 1}
    assert [str(node.target) for node in program.graph.nodes][1:4] == ["x", "b", "a"]
    assert torch.equal(program(torch.ones(1)), before)


def test_what_is_in_order_is_left_alone() -> None:
    program = shuffled()
    forget_unread(program)
    names = [node.name for node in program.graph.nodes]
    assert not order_constants(program, program.graph)
    assert [node.name for node in program.graph.nodes] == names


def test_unread_constants_go_with_their_tensors_under_all_their_names() -> None:
    program = shuffled()
    forget_unread(program)
    assert head(program) == ["x", "b", "a"]
    assert set(program.root._parameters) == {"a", "b", "same"}
    assert set(program.root._buffers) == set()
    assert program(torch.ones(1)).tolist() == [18.0]


def test_counters_of_batches_and_tensors_of_opaque_modules_stay() -> None:
    program = small_net()
    program.root.layer = nn.Linear(4, 4)
    program.root.register_buffer("left", torch.zeros(1))
    relu = program.node("relu")
    program.replace(relu, program.emit("layer", relu.args, before=relu, like=relu))
    forget_unread(program)
    assert set(program.root.state_dict()) == {"w", "mean", "var", "count", "layer.weight", "layer.bias"}


def test_a_graph_that_computes_nothing_has_its_constants() -> None:
    root, graph = nn.Module(), fx.Graph()
    root.a = nn.Parameter(torch.ones(1))
    held = graph.create_node("get_attr", "a")
    graph.placeholder("x")
    graph.output((held,))
    program = Program(graph, root, signature_of(graph, 1))
    forget_unread(program)
    assert head(program) == ["x", "a"]
