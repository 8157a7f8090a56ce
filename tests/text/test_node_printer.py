"""Lines of nodes: names, types, arguments that are no defaults, and references to what is nested."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn

from quantc.errors import QuantcError
from quantc.ir.program import Program
from quantc.ir.signature import Input, Signature
from quantc.ir.sites import Origin
from quantc.ir.types import TensorType
from quantc.text.digests import Constants
from quantc.text.node_printer import GraphLines, OpaqueModule, at, default_type, inline_nodes, module_facts, slots
from quantc.text.printer import dump
from tests.support.programs import Builder, aten, signature_of, small_net


def lines_of(program: Program) -> GraphLines:
    return GraphLines(program, "", program.graph, Constants(program))


def test_defaults_are_omitted_and_later_arguments_named() -> None:
    build = Builder()
    x, y = build.input("x", 2, 4), build.input("y", 2, 4)
    build.call(aten.add.Tensor, x, y, alpha=1)
    build.call(aten.add.Tensor, x, y, alpha=2)
    build.call(aten.gelu.default, x, approximate="tanh")
    build.call(aten.layer_norm.default, x, [4], None, None, 1e-5, True)
    last = build.call(aten.cumsum.default, x, 1, dtype=torch.float64)
    lines = [line.strip() for line in dump(build.program(last)).splitlines()]
    assert lines[3:8] == [
        "%add : f32[2,4] = add(%x, %y)",
        "%add_1 : f32[2,4] = add(%x, %y, alpha=2)",
        '%gelu : f32[2,4] = gelu(%x, approximate="tanh")',
        "%layer_norm : f32[2,4] = layer_norm(%x, [4])",
        "%cumsum : f64[2,4] = aten.cumsum.default(%x, 1, dtype=f64)",
    ]


def test_a_line_is_keyword_name_tail_and_origin() -> None:
    program = small_net()
    lines = lines_of(program)
    conv = program.node("conv2d")
    assert lines.line(conv) == "%conv2d : f32[2,2,4,4] = conv2d(%x, %w, padding=[1, 1])  # c : Conv2d @ model.py:12"
    assert lines.line(conv) == f"{lines.line_without_origin(conv)}  # {program.origins[conv]}"
    assert lines.line_without_origin(conv) == f"%conv2d{lines.tail(conv)}"
    assert lines.line(program.node("x")) == "input %x : f32[2,3,4,4]"
    assert lines.line(program.node("w")).startswith('const %w = "w" : f32[2,3,3,3] param #')
    assert lines.line(program.graph.output_node()) == "output (%relu,)"


def test_references_are_those_the_caller_chooses() -> None:
    program = small_net()
    lines = lines_of(program)
    lines.refs[program.node("dropout")] = "%0"
    assert lines.call(program.node("relu")) == "relu(%0)"


def test_operands_are_positional_and_the_rest_is_named() -> None:
    conv = [(slot.name, slot.is_positional, slot.default) for slot in slots(aten.conv2d.default)]
    assert conv[:4] == [("x", True, None), ("w", True, None), ("b", True, "None"), ("stride", False, "[1, 1]")]
    assert [slot.is_positional for slot in slots(aten.cumsum.default)] == [True, True, False]


def test_calls_of_methods_modules_and_functions() -> None:
    graph, root = fx.Graph(), nn.Module()
    root.act = nn.ReLU()
    x = graph.placeholder("x")
    method = graph.call_method("view", (x, 2), {"key": [x]})
    module = graph.call_module("act", (method,))
    function = graph.call_function(operator.getitem, (module, slice(None, x)))
    graph.output((function,))
    lines = lines_of(Program(graph, root, signature_of(graph, 1)))
    assert lines.call(method) == "call_method .view(%x, 2, key=[%x])"
    assert lines.tail(module) == ' = call_module @act(%view) {type="torch.nn.modules.activation.ReLU"}'
    assert lines.call(function) == "operator:getitem(%act, slice(None, %x, None))"


def test_inputs_show_what_the_signature_says_beside_their_type() -> None:
    graph = fx.Graph()
    x, flag = graph.placeholder("x"), graph.placeholder("flag")
    x.meta["val"] = TensorType(torch.float32, (2, 4))
    graph.output((x,))
    spec = signature_of(graph, 1)
    inputs = (Input("image", TensorType(torch.float32, ("s0", 4))), Input("flag", None, True, ("fast", 3)))
    program = Program(graph, nn.Module(), Signature(inputs, spec.in_spec, spec.out_spec))
    lines = lines_of(program)
    assert lines.line(x) == 'input %x : f32[2,4] {name="image", accepts="f32[s0,4]"}'
    assert lines.line(flag) == 'input %flag = ("fast", 3)'
    assert default_type(x) == TensorType(torch.float32, (2, 4))
    assert default_type(flag) is None


def test_constants_that_are_no_tensors_are_described() -> None:
    graph, root = fx.Graph(), nn.Module()
    vars(root).update(number=3)
    root.layer = nn.ReLU()
    for name in ("number", "layer", "gone"):
        graph.create_node("get_attr", name)
    graph.output(())
    lines = lines_of(Program(graph, root, signature_of(graph, 0)))
    assert lines.constant("number") == '"number" value 3'
    assert lines.constant("gone") == '"gone" missing'
    assert lines.constant("layer") == '"layer" module {type="torch.nn.modules.activation.ReLU"}'


def test_a_comment_cannot_break_its_line() -> None:
    program = small_net()
    relu = program.node("relu")
    program.origins[relu] = Origin("a\nb\u2028c\x00")
    assert lines_of(program).line(relu).endswith("  # a?b?c?")


def test_plain_references_need_no_quotes() -> None:
    assert [at(path) for path in ("a/b.c-1", "a b", 'x"', "é")] == ["@a/b.c-1", '@"a b"', '@"x\\""', '@"\\u00e9"']


def branches(*order: str) -> tuple[fx.Graph, nn.Module]:
    """A cond whose graphs stand before it in this order; "relu" is a call between them."""
    root, graph = nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    nodes: dict[str, fx.Node] = {}
    for name in order:
        if name == "relu":
            graph.call_function(aten.relu.default, (x,))
            continue
        inner = fx.Graph()
        inner.output((inner.placeholder("a"),))
        root.add_module(name, fx.GraphModule(nn.Module(), inner))
        nodes[name] = graph.create_node("get_attr", name)
    graph.call_function(torch.ops.higher_order.cond, (x, nodes["yes"], nodes["no"], (x,)))
    graph.output((x,))
    return graph, root


@pytest.mark.parametrize(
    ("order", "inline"),
    [
        (("yes", "no"), {"yes", "no"}),
        (("no", "yes"), set()),
        (("yes", "no", "relu"), set()),
        (("yes", "relu", "no"), {"no"}),
    ],
)
def test_nested_graphs_are_inline_right_before_their_call_and_in_its_order(
    order: tuple[str, ...], inline: set[str]
) -> None:
    assert {node.name for node in inline_nodes(*branches(*order))} == inline


def test_a_module_that_is_not_there_says_how_to_give_it() -> None:
    missing = OpaqueModule("inner.act", "my.Act", "0123abcd")
    assert module_facts(missing) == ("my.Act", "0123abcd")
    with pytest.raises(QuantcError, match=r"'inner\.act' \(my\.Act\)") as caught:
        missing(torch.ones(1))
    assert caught.value.advice is not None
    assert "modules=" in caught.value.advice
