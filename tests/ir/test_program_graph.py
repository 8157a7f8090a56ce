"""The graph of a program: nodes found by name, and changes that keep the side tables in step."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from quantc.errors import UnknownNameError
from quantc.ir.plan import Claim
from quantc.ir.sites import Site
from quantc.ir.types import TensorType
from tests.support.programs import Choice, aten, exported, relu_times_constant

X = torch.tensor([[-1.0, 1.0, 2.0], [3.0, -4.0, 5.0]])


# -- reading -----------------------------------------------------------------------------------------------------------


def test_nodes_are_found_by_name_in_the_graph_their_path_names() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    inner = program.node("false_graph_0/sub")
    assert inner.target is aten.sub.Tensor
    assert program.has_node("false_graph_0/sub")
    assert not program.has_node("sub")
    assert program.site(inner, operand=1) == Site("false_graph_0", "sub", operand=1)
    assert program.site(program.node("linear")) == Site("", "linear", out=0)
    with pytest.raises(UnknownNameError, match="lineer") as caught:
        program.node("lineer")
    assert caught.value.advice is not None
    assert "linear" in caught.value.advice


def test_nodes_of_a_module_are_those_at_its_path_and_below() -> None:
    program = relu_times_constant()
    assert [node.name for node in program.module_nodes("layer")] == ["relu"]
    assert [node.name for node in program.module_nodes("layer.act")] == ["relu"]
    assert program.module_nodes("lay") == []


def test_constants_and_origins_of_nodes() -> None:
    program = relu_times_constant()
    held = program.tensor(program.node("layer_w"))
    assert held is not None
    assert held.tolist() == [1.0, 2.0, 3.0]
    assert program.tensor(program.node("relu")) is None
    assert program.describe(program.node("relu")) == "relu (layer.act : ReLU @ model.py:3)"
    assert program.describe(program.node("x")) == "x"


def test_opaque_nodes_are_those_without_a_canonical_form() -> None:
    program = relu_times_constant()
    assert program.opaque() == []
    node = program.emit(torch.sigmoid, (program.node("relu"),), before=program.node("mul"))
    assert program.opaque() == [node]


# -- changing ----------------------------------------------------------------------------------------------------------


def test_an_emitted_call_has_the_origin_of_its_place_or_of_what_it_is_like() -> None:
    program = relu_times_constant()
    relu, mul = program.node("relu"), program.node("mul")
    near = program.emit(aten.neg.default, (relu,), before=mul)
    like = program.emit(aten.neg.default, (relu,), before=mul, like=relu)
    assert program.origins[near] == program.origins[mul]
    assert program.origins[like] == program.origins[relu]
    assert ("val" in near.meta, like.meta["val"] is relu.meta["val"]) == (False, True)
    assert (near.name, like.name) == ("neg", "neg_1")
    assert [node.name for node in program.graph.nodes][-4:] == ["neg", "neg_1", "mul", "output"]
    typed = program.emit(aten.neg.default, (relu,), before=mul, like=relu, value=TensorType(torch.int8, ()))
    assert str(typed.meta["val"]) == "i8[]"


def test_the_module_is_rebuilt_after_a_change_and_only_then() -> None:
    program = relu_times_constant()
    assert program(X).tolist() == [[0.0, 2.0, 6.0], [3.0, 0.0, 15.0]]
    module = program.module
    assert program.module is module
    relu = program.node("relu")
    program.replace(relu, program.emit(aten.abs.default, relu.args, before=relu, like=relu))
    assert program.module is not module
    assert program(X).tolist() == [[1.0, 2.0, 6.0], [3.0, 8.0, 15.0]]


def test_rows_follow_a_replacement_and_vanish_with_an_erased_node() -> None:
    program = relu_times_constant()
    relu, mul = program.node("relu"), program.node("mul")
    program.plan.claims[relu] = Claim("q", "r", "relu")
    new = program.emit(aten.abs.default, relu.args, before=relu)
    program.replace(relu, new)
    assert program.plan.claims[new].rule == "r"
    assert program.origins[new].module_path == "layer.act"
    assert relu not in program.plan.claims
    program.forward(mul, new)
    assert mul not in program.origins
    assert program.graph.output_node().args == ((new,),)


def test_constants_get_names_of_their_own() -> None:
    program = relu_times_constant()
    mul = program.node("mul")
    made = [program.constant("deep.er.w", torch.full((3,), float(index)), before=mul) for index in range(3)]
    assert [node.target for node in made] == ["deep.er.w", "deep.er.w_1", "deep.er.w_2"]
    assert [str(node.meta["val"]) for node in made] == ["f32[3]"] * 3
    trained = program.constant("v", nn.Parameter(torch.ones(3)), before=mul)
    assert [name for name, _ in program.named_parameters()] == ["v"]
    mul.args = (mul.args[0], trained)
    program.touch()
    assert torch.equal(program(X), X.relu())


def test_nested_graphs_are_stored_under_names_of_their_own() -> None:
    program = relu_times_constant()
    mul = program.node("mul")
    graphs = [fx.Graph() for _ in range(2)]
    for graph in graphs:
        graph.output((graph.placeholder("x"),))
    made = [program.subgraph("body", graph, before=mul) for graph in graphs]
    assert [node.target for node in made] == ["body", "body_1"]
    assert dict(program.graphs()) == {"": program.graph, "body": graphs[0], "body_1": graphs[1]}
    program.verify()
