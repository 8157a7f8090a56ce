"""Constants of nested graphs as operands of their calls, and norms that check the size of what they are given."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.ir.lift_constants import lift_constants, spell_norms, with_checked_norms
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from tests.support.programs import Builder, aten, signature_of

KIND = TensorType(torch.float32, ("s0", 3))
COND = torch.ops.higher_order.cond


def branch(**weights: Tensor) -> fx.GraphModule:
    """`x` times each of the weights, which the branch holds itself."""
    root, graph = nn.Module(), fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = KIND
    for name, weight in weights.items():
        root.register_buffer(name, weight)
        held = graph.create_node("get_attr", name)
        held.meta["val"] = TensorType(torch.float32, tuple(weight.shape))
        value = graph.call_function(aten.mul.Tensor, (value, held))
        value.meta["val"] = KIND
    graph.output((value,))
    return fx.GraphModule(root, graph)


def choosing(calls: int = 1) -> Program:
    """Branches that share one weight; one has a second of its own."""
    shared = torch.tensor([1.0, 2.0, 3.0])
    root, graph = nn.Module(), fx.Graph()
    root.yes, root.no = branch(w=shared, more=torch.full((3,), 10.0)), branch(weight=shared)
    x = graph.placeholder("x")
    x.meta["val"] = KIND
    above = graph.call_function(aten.gt.Scalar, (graph.call_function(aten.sum.default, (x,)), 0))
    value: fx.Node = x
    for _ in range(calls):
        graphs = [graph.create_node("get_attr", name) for name in ("yes", "no")]
        value = graph.call_function(operator.getitem, (graph.call_function(COND, (above, *graphs, (value,))), 0))
    graph.output((value,))
    return Program(graph, root, signature_of(graph, 1))


def held(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.find_nodes(op="get_attr")]


def test_each_tensor_is_passed_once_and_every_graph_takes_all() -> None:
    program = choosing()
    before = str(program)
    graph, parts = lift_constants(program, False)
    (call,) = graph.find_nodes(op="call_function", target=COND)
    assert [str(operand.target) for operand in call.args[3]] == ["x", "yes.w", "yes.more"]
    for name in ("yes", "no"):
        assert held(parts[name]) == []
        assert len(parts[name].graph.find_nodes(op="placeholder")) == 3
    assert parts["yes.w"] is program.root.get_buffer("yes.w"), "the tensors are the program's own"
    assert str(program) == before


def test_the_result_is_that_of_the_branches() -> None:
    program = choosing()
    x = torch.tensor([[1.0, 1.0, 1.0]])
    assert program(x).tolist() == [[10.0, 20.0, 30.0]]
    assert program(-x).tolist() == [[-1.0, -2.0, -3.0]]


def test_inputs_of_nested_graphs_have_values_that_torch_can_read() -> None:
    _, parts = lift_constants(choosing(), False)
    values = [node.meta["val"] for node in parts["no"].graph.find_nodes(op="placeholder")]
    assert [(value.dtype, tuple(value.shape[1:]), value.device.type) for value in values] == [
        (torch.float32, (3,), "meta"),
        (torch.float32, (), "meta"),
        (torch.float32, (), "meta"),
    ]


def test_a_graph_with_several_calls_keeps_its_constants() -> None:
    program = choosing(calls=2)
    graph, parts = lift_constants(program, False)
    assert held(parts["yes"]) == ["w", "more"]
    assert all(len(call.args[3]) == 1 for call in graph.find_nodes(op="call_function", target=COND))


# -- norms -------------------------------------------------------------------------------------------------------------


def normed(training: bool) -> Program:
    build = Builder()
    x = build.input("x", 5, 2)
    mean, var = build.constant("mean", torch.zeros(2)), build.constant("var", torch.ones(2))
    w, b = build.constant("w", torch.tensor([2.0, 3.0])), build.constant("b", torch.tensor([0.5, 0.25]))
    return build.program(
        build.call(aten.batch_norm.default, x, w, b, mean, var, training, momentum=0.25, eps=0.5, cudnn_enabled=False)
    )


def test_a_checked_norm_refuses_one_value_a_channel_and_writes_nothing() -> None:
    program = normed(training=True)
    checked = fx.GraphModule(program.root, with_checked_norms(program.graph))
    with pytest.raises(ValueError, match="more than 1 value"):
        checked(torch.ones(1, 2))
    assert torch.equal(program.root.get_buffer("mean"), torch.zeros(2))
    assert program.node("batch_norm").target is aten.batch_norm.default, "the program's own graph is left alone"


@pytest.mark.parametrize("training", [True, False])
def test_a_checked_norm_computes_what_the_op_does(training: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2)
    plain, checked = normed(training), normed(training)
    spell_norms(checked.graph)
    expected = fx.GraphModule(plain.root, plain.graph)(x)
    assert torch.equal(fx.GraphModule(checked.root, checked.graph)(x)[0], expected[0])
    for name in ("mean", "var"):
        assert torch.equal(checked.root.get_buffer(name), plain.root.get_buffer(name))
    assert torch.equal(plain.root.get_buffer("mean"), torch.zeros(2)) != training
