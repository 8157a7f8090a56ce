"""Dump text read back: round trips, every literal, malformed text, and text that means harm."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import ParseError
from quantc.ir.program import Program, Stage
from quantc.ir.signature import Input, Signature
from quantc.ir.sites import Origin
from quantc.ir.types import TensorType
from quantc.text.digests import constants
from quantc.text.parser import parse
from quantc.text.printer import dump, numbered
from tests.support.programs import Builder, Choice, aten, exported, signature_of, small_net


def assert_round_trip(program: Program) -> Program:
    """Read back without and with constants; both print the same again. Gives the one with constants."""
    text = dump(program)
    bare = parse(text)
    assert dump(bare) == text
    assert dump(bare.clone()) == text
    assert numbered(bare) == numbered(program)
    full = parse(text, constants(program))
    assert dump(full) == text
    return full


# -- whole programs ----------------------------------------------------------------------------------------------------


def test_small_net_comes_back_whole() -> None:
    program = small_net()
    copy = assert_round_trip(program)
    x = torch.randn(2, 3, 4, 4)
    assert torch.equal(copy(x), program(x))
    assert copy.stage is Stage.CANONICAL
    assert copy.origins[copy.node("conv2d")] == Origin("c", "Conv2d", "model.py", 12)
    assert copy.modes[copy.node("batch_norm")] == program.modes[program.node("batch_norm")]
    assert copy.counters[copy.node("batch_norm")] == "count"
    assert copy.node("relu").meta["val"] == TensorType(torch.float32, (2, 2, 4, 4))
    torch.manual_seed(0)
    expected = program.train()(x)
    torch.manual_seed(0)
    assert torch.equal(copy.train()(x), expected)


def test_without_constants_the_program_is_on_meta() -> None:
    program = parse(dump(small_net()))
    weight = program.root.get_parameter("w")
    assert weight.device.type == "meta"
    assert isinstance(weight, nn.Parameter)


def test_cond_in_cond_with_tied_weights_runs_again() -> None:
    model = Choice()
    program = exported(model, [torch.ones(2, 4)])
    copy = assert_round_trip(program)
    assert copy.root.get_parameter("first.weight") is copy.root.get_parameter("second.weight")
    for x in (torch.ones(2, 4) * 3, torch.ones(2, 4) * 0.5, -torch.ones(2, 4)):
        expected, got = pytree.tree_leaves(model(x)), copy.run_flat([x])
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_dynamic_sizes() -> None:
    dims = {"x": {0: torch.export.Dim("batch", min=2, max=64)}}
    program = exported(Choice(), [torch.ones(3, 4)], dynamic_shapes=dims)
    copy = assert_round_trip(program)
    assert copy.signature.ranges == program.signature.ranges
    assert copy.signature.inputs == program.signature.inputs


def test_the_whole_signature() -> None:
    graph = fx.Graph()
    x, flag = graph.placeholder("x"), graph.placeholder("flag")
    x.meta["val"] = TensorType(torch.float32, (2, 4))
    y = graph.call_function(aten.relu.default, (x,))
    graph.output((y, y))
    inputs = (Input("x", TensorType(torch.float32, ("s0", 4))), Input("mode", None, True, ("fast", 3)))
    in_spec = pytree.tree_structure(((0,), {"mode": 0}))
    out_spec = pytree.tree_structure({"one": 0, "two": [0]})
    program = Program(graph, nn.Module(), Signature(inputs, in_spec, out_spec, {"s0": (2, None)}), method="fx")
    program.inference_only = ("why", 'a "quoted"\nreason')
    program.training = True
    copy = assert_round_trip(program)
    assert copy.signature == program.signature
    assert (copy.inference_only, copy.training, copy.method) == (program.inference_only, True, "fx")
    assert copy.node("flag").op == flag.op == "placeholder"


def users_function(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_python_function_must_be_given() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(users_function, (graph.placeholder("x"),)),))
    text = dump(Program(graph, nn.Module(), signature_of(graph, 1)))
    with pytest.raises(ParseError, match="functions="):
        parse(text)
    name = next(line.split(" = ")[1].split("(")[0] for line in text.splitlines() if "users_function" in line)
    program = parse(text, functions={name: users_function})
    assert dump(program) == text
    assert torch.equal(program(torch.ones(2)), torch.full((2,), 2.0))


def test_calls_before_canonicalization() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(x).view(x.shape[0], -1)
            y = nn.functional.max_pool1d(y, 2) + math.pi
            return torch.einsum("ij->ji", y).add_(1)

    traced = fx.symbolic_trace(Mixed())
    traced.graph.find_nodes(op="output")[0].args = ((traced.graph.find_nodes(op="output")[0].args[0],),)
    program = Program(traced.graph, traced, signature_of(traced.graph, 1))
    copy = assert_round_trip(program)
    x = torch.randn(2, 4)
    assert torch.equal(copy(x), Mixed()(x))


def test_a_nested_graph_under_two_names_and_an_odd_one() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    program.root.add_module("same", program.root.get_submodule("false_graph_0"))
    cond = program.node("cond")
    with program.graph.inserting_before(cond):
        other = program.graph.create_node("get_attr", "same", name="another")
    cond.args = (cond.args[0], other, *cond.args[2:])
    text = dump(program)
    assert "graph @false_graph_0 = @same" in text or "graph @same = @false_graph_0" in text
    assert "const %another = @same" in text
    assert_round_trip(program)


def test_kinds_of_constants() -> None:
    build = Builder()
    x = build.input("x", 2)
    rows = [build.constant("frozen", nn.Parameter(torch.ones(2), requires_grad=False))]
    build.root.register_buffer("passing", torch.ones(2), persistent=False)
    build.root.plain = torch.tensor([1.5, 2.5])
    vars(build.root).update(number=3, names=("a", "b"))
    for name in ("passing", "plain"):
        rows.append(build.graph.create_node("get_attr", name))
        rows[-1].meta["val"] = TensorType(torch.float32, (2,))
    for name in ("number", "names"):
        build.graph.create_node("get_attr", name)
    for row in rows:
        x = build.call(aten.mul.Tensor, x, row)
    text = dump(build.program(x))
    for expected in ("param frozen #", "buffer transient #", "tensor #", "value 3", 'value ("a", "b")'):
        assert expected in text
    assert_round_trip(parse(text, constants(Program(build.graph, build.root, signature_of(build.graph, 1)))))


def test_names_of_builtins_and_odd_origins_are_kept() -> None:
    build = Builder()
    x = build.input("x", 2)
    node = build.call(aten.relu.default, x)
    node.name = "max"
    program = build.program(node)
    program.origins[node] = Origin("a b : c @ d", "T", "some file.py", 3)
    program.origins[x] = Origin(file="model.py", line=4)
    copy = parse(dump(program))
    assert dump(copy) == dump(program)
    assert copy.node("max").op == "call_function"
    assert copy.emit(aten.relu.default, (copy.node("max"),), before=copy.graph.output_node(), name="max").name != "max"


# -- constants ---------------------------------------------------------------------------------------------------------


# -- literals ----------------------------------------------------------------------------------------------------------


# -- random programs ---------------------------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Small graphs of elementwise ops, splits, joins and constants, some tied, with origins and several outputs."""
    build = Builder()
    shared = nn.Parameter(torch.ones(4))
    tensors = [build.input(f"in_{index}", 2, 4) for index in range(draw(st.integers(1, 3)))]
    for index in range(draw(st.integers(0, 3))):
        value = draw(st.sampled_from([shared, torch.full((4,), float(index)), nn.Parameter(torch.zeros(2, 4))]))
        build.constant(f"c{index}", value)
    weights = list(build.graph.find_nodes(op="get_attr"))
    for _ in range(draw(st.integers(0, 12))):
        pick = st.sampled_from(tensors)
        kind = draw(st.sampled_from(["unary", "binary", "weighted", "clamp", "cat", "split", "softmax"]))
        if kind == "binary":
            node = build.call(aten.sub.Tensor, draw(pick), draw(pick), alpha=draw(st.sampled_from([1, 2, 0.5])))
        elif kind == "weighted" and weights:
            node = build.call(aten.mul.Tensor, draw(pick), draw(st.sampled_from(weights)))
        elif kind == "clamp":
            node = build.call(aten.clamp.default, draw(pick), draw(st.none() | st.just(-1.0)), draw(st.floats(0, 9)))
        elif kind == "cat":
            both = build.call(aten.cat.default, [draw(pick), draw(pick)], 1)
            node = build.call(aten.slice.Tensor, both, 1, 2, 6)
        elif kind == "split":
            parts = build.call(aten.split.Tensor, draw(pick), 2, 1)
            halves = [_item(build, parts, index) for index in draw(st.permutations([0, 1]))]
            node = build.call(aten.cat.default, halves, -1)
        elif kind == "softmax":
            node = build.call(aten.softmax.int, draw(pick), draw(st.sampled_from([0, -1])), None)
        else:
            node = build.call(
                draw(st.sampled_from([aten.relu.default, aten.tanh.default, aten.neg.default])), draw(pick)
            )
        tensors.append(node)
    program = build.program(*draw(st.lists(st.sampled_from(tensors), min_size=1, max_size=3)))
    program.stage = draw(st.sampled_from(list(Stage)))
    for node in tensors:
        if draw(st.booleans()):
            program.origins[node] = Origin(*draw(st.tuples(st.text(max_size=5), st.text(max_size=5))), "f.py", 3)
    return program


def _item(build: Builder, parts: fx.Node, index: int) -> fx.Node:
    return build.call(operator.getitem, parts, index)


@settings(max_examples=60)
@given(programs())
def test_any_program_comes_back(program: Program) -> None:
    copy = assert_round_trip(program)
    program.verify()
    copy.verify()
    inputs = [torch.randn(2, 4) for _ in program.signature.inputs]
    for expected, got in zip(program.run_flat(inputs), copy.run_flat(inputs), strict=True):
        assert torch.equal(expected, got)


def test_a_nested_graph_far_from_its_call_keeps_its_place() -> None:
    program = exported(Choice(), [torch.ones(2, 4)])
    first = next(node for node in program.graph.nodes if node.op == "call_function")
    first.prepend(program.node("false_graph_0"))
    copy = assert_round_trip(program)
    assert [node.name for node in copy.nodes()] == [node.name for node in program.nodes()]
    assert "const %false_graph_0 = @false_graph_0" in dump(copy)
