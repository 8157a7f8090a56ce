"""What a match is made of: users, sharing, equal parts, orders, alternatives; and that nothing makes it raise."""

from __future__ import annotations

import itertools
import operator
from typing import Any

import pytest
import torch

from quantc.patterns import (
    Rule,
    RuleTable,
    any_of,
    const,
    op,
    optional,
    out,
    result,
    shared,
    value,
)
from quantc.patterns import aten as v
from quantc.patterns.rule_matcher import Matcher
from tests.support.pattern_graphs import Build, found, refused


def test_chain_with_optional_steps_prefers_the_longest() -> None:
    b = Build()
    x, w = b.input("x"), b.const("w", 4, 4, 1, 1)
    conv = b("conv2d", x, w)
    relu = b("relu", conv)
    lone = b("conv2d", relu, w)
    program = b.done(lone)
    pattern = v.conv.named("conv") >> optional(v.relu) >> optional(v.sigmoid)
    assert found(pattern, program, relu).nodes == (conv, relu)
    assert found(pattern, program, relu)["conv"] is conv
    assert found(pattern, program, lone).nodes == (lone,)


def test_optional_operand_node_gives_way_to_its_own_operand() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    relu = b("relu", x)
    one, two = b("sub", relu, y), b("sub", y, x)
    program = b.done(one, two)
    pattern = v.sub(optional(v.relu("a")), "b")
    assert found(pattern, program, one).bindings == {"a": x, "b": y}
    assert found(pattern, program, two).bindings == {"a": y, "b": x}


def test_a_second_user_refuses_and_is_named() -> None:
    b = Build()
    x, w = b.input("x"), b.const("w", 4, 4, 1, 1)
    conv = b("conv2d", x, w)
    relu, mul = b("relu", conv), b("mul", conv, 2)
    program = b.done(relu, mul)
    assert refused(v.conv >> v.relu, program, relu) == "conv2d has 2 users; mul uses it too"
    match = found(shared(v.conv.named("conv")) >> v.relu, program, relu)
    assert match.nodes == (relu,)
    assert match["conv"] is conv


def test_a_second_user_refuses_when_the_pattern_could_have_had_two() -> None:
    b = Build()
    relu = b("relu", b.input("x"))
    tanh, neg = b("tanh", relu), b("neg", relu)
    program = b.done(tanh, neg)
    assert refused(v.relu >> optional(v.sigmoid) >> v.tanh, program, tanh) == "relu has 2 users; neg uses it too"


def test_a_shared_user_stays_so_what_it_uses_cannot_be_claimed() -> None:
    b = Build()
    relu = b("relu", b.input("x"))
    sigmoid = b("sigmoid", relu)
    product = b("mul", relu, sigmoid)
    program = b.done(product, b("neg", sigmoid))
    pattern = v.mul(v.relu.named("r"), shared(v.sigmoid("r")))
    assert refused(pattern, program, product) == "relu has 2 users; sigmoid uses it too"


def test_the_program_output_counts_as_a_user() -> None:
    b = Build()
    sigmoid = b("sigmoid", b.input("x"))
    relu = b("relu", sigmoid)
    program = b.done(relu, sigmoid)
    assert refused(v.sigmoid >> v.relu, program, relu) == "sigmoid has 2 users; output uses it too"


def test_sharing_spreads_to_what_feeds_a_shared_node() -> None:
    b = Build()
    sigmoid = b("sigmoid", b.input("x"))
    relu = b("relu", sigmoid)
    tanh = b("tanh", relu)
    program = b.done(tanh, b("neg", relu))
    assert found(v.sigmoid >> shared(v.relu) >> v.tanh, program, tanh).nodes == (tanh,)


def test_names_and_equal_parts_make_a_dag() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    silu = b("mul", b("sigmoid", x), x)
    other = b("mul", x, b("sigmoid", y))
    program = b.done(silu, other)
    pattern = v.mul("x", v.sigmoid("x"))
    assert found(pattern, program, silu)["x"] is x
    assert refused(pattern, program, other) == "x is y (placeholder) already, so it cannot be x (placeholder) too"


def test_hardswish_by_hand() -> None:
    b = Build()
    x = b.input("x")
    product = b("mul", x, b("clamp", b("add", x, 3), 0, 6))
    hardswish = b("div", product, 6)
    program = b.done(hardswish)
    pattern = v.div(v.mul("x", op("clamp")(v.add("x", 3), 0, 6)), 6)
    match = found(pattern, program, hardswish)
    assert match["x"] is x
    assert [node.name for node in match.nodes] == ["add", "clamp", "mul", "div"]


def test_one_sub_pattern_twice_is_one_node_with_two_users() -> None:
    b = Build()
    x = b.input("x")
    left, right = b("relu", x), b("relu", x)
    same, apart = b("add", left, b("sigmoid", left)), b("add", right, b("sigmoid", b("relu", x)))
    program = b.done(same, apart)
    relu = op("relu", args="_")
    pattern = v.add(relu, v.sigmoid(relu))
    assert len(found(pattern, program, same).nodes) == 3
    assert "name them apart with .named()" in refused(pattern, program, apart)
    named_apart = v.add(relu.named("a"), v.sigmoid(relu.named("b")))
    assert len(found(named_apart, program, apart).nodes) == 4
    assert refused(named_apart, program, same) == "relu has 2 users; sigmoid uses it too"


def test_two_nodes_of_a_pattern_are_two_nodes_of_the_graph() -> None:
    b = Build()
    relu = b("relu", b.input("x"))
    doubled = b("add", relu, relu)
    program = b.done(doubled)
    assert len(found(v.add(v.relu, v.relu), program, doubled).nodes) == 2
    apart = v.add(v.relu.named("a"), v.relu.named("b"))
    assert refused(apart, program, doubled) == "relu is part of the match already"


def test_a_named_node_can_be_an_operand_elsewhere() -> None:
    b = Build()
    conv = b("conv2d", b.input("x"), b.const("w", 4, 4, 1, 1))
    gated = b("mul", conv, b("sigmoid", conv))
    program = b.done(gated)
    match = found(v.mul(v.conv.named("c"), v.sigmoid("c")), program, gated)
    assert len(match.nodes) == 3


def test_a_value_is_not_a_node_of_the_match() -> None:
    b = Build()
    relu = b("relu", b.input("x"))
    doubled = b("add", relu, relu)
    program = b.done(doubled)
    assert refused(v.add(v.relu, "y"), program, doubled) == "y is relu, which is itself part of the match"


def test_commuting_operands_are_tried_in_both_orders_but_not_with_alpha() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    relu, again = b("relu", x), b("relu", x)
    plain, scaled, minus = b("add", y, relu), b("add", y, again, alpha=2), b("sub", y, b("relu", x))
    program = b.done(plain, scaled, minus)
    assert found(op("add")(v.relu, "y"), program, plain)["y"] is y
    assert "expected relu, found y" in refused(op("add")(v.relu, "y"), program, scaled)
    assert "expected relu, found y" in refused(v.sub(v.relu, "y"), program, minus)


def test_alternatives_are_tried_in_order() -> None:
    b = Build()
    x, w = b.input("x"), b.const("w", 4, 4)
    relu = b("relu", b("linear", x, w))
    program = b.done(relu)
    pattern = any_of(v.conv, v.linear).named("producer") >> v.relu
    assert found(pattern, program, relu).node("producer").name == "linear"
    assert (
        refused(any_of(v.conv, v.matmul) >> v.relu, program, relu) == "expected conv1d, conv2d or conv3d, found linear"
    )


def test_outputs_of_ops_that_give_several() -> None:
    b = Build()
    x = b.input("x", 4, 6)
    halves = b("split", x, 2, 1)
    first, second = b.call(operator.getitem, halves, 0), b.call(operator.getitem, halves, 1)
    relu, tanh = b("relu", first), b("tanh", second)
    top = b("max", tanh, 1)
    values = b.call(operator.getitem, top, 0)
    program = b.done(b("add", relu, relu), values)
    assert found(out("max", 0, args="x"), program, values).nodes == (top, values)
    assert "expected 1, found 0" in refused(out("max", 1), program, values)
    assert refused(out("split", 0) >> v.relu, program, relu).startswith("split has 2 users")
    match = found(result(shared(v.split.named("s")), 0) >> v.relu, program, relu)
    assert match.nodes == (first, relu)
    assert match["s"] is halves
    assert found(result(shared(v.split)) >> v.tanh, program, tanh).nodes == (second, tanh)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_ops(kind: str) -> None:
    module = torch.nn.LSTM(3, 5) if kind == "lstm" else torch.nn.GRU(3, 5)
    b = Build()
    x = b.input("x", 2, 1, 3)
    params = [b.const(name, *value.shape) for name, value in module.named_parameters()]
    states = [b.input(f"h{index}", 1, 1, 5) for index in range(2 if kind == "lstm" else 1)]
    hidden: Any = states if kind == "lstm" else states[0]
    call = b(kind, x, hidden, params, True, 1, 0.0, False, False, False)
    output = b.call(operator.getitem, call, 0)
    program = b.done(output)
    pattern = result(getattr(v, kind), 0)
    match = found(pattern, program, output)
    assert match["params"] == tuple(params)
    assert match.nodes == (call, output)


def test_chains_associate() -> None:
    a, c, d = v.conv, optional(v.batch_norm), v.relu
    assert (a >> c) >> d == a >> (c >> d)


# -- never raises, never runs away -------------------------------------------------------------------------------


def test_odd_graphs_never_raise() -> None:
    b = Build()
    graph = b.graph
    x = b.input("x")
    missing = graph.get_attr("not.there")
    nodes = [
        b("conv2d"),
        b("conv2d", None, None),
        b("conv2d", 3, [x, None], {"a": x}),
        b("add", x, other=missing),
        b("add", *[x] * 5),
        b("cat", x),
        b("cat", [x, None, 2]),
        b("batch_norm", x, None, None, None, None, True, 0.1, 1e-5, False),
        graph.call_module("nowhere", (x,)),
        graph.call_method("relu", (x,)),
        graph.call_function(operator.getitem, (x, (0, slice(None)))),
        graph.call_function(print, (x,)),
    ]
    for node in list(nodes):
        nodes.append(b("relu", node))
        nodes.append(b("mul", node, node))
    program = b.done(*nodes)
    patterns = [
        v.conv,
        v.conv >> v.relu,
        v.add(const("a"), "b"),
        v.cat,
        op("cat")(["x", "y", 2]),
        v.mul(optional(v.relu("x")), "x"),
        result(v.split) >> v.relu,
        v.batch_norm("x", "w", "b").having(training=False),
        v.conv(value("x", rank=4), const("w", dtype="f32"), "_*"),
    ]
    rules = tuple(Rule(f"r{index}", pattern) for index, pattern in enumerate(patterns))
    table = RuleTable("odd", rules)
    for node, rule in itertools.product(graph.nodes, rules):
        Matcher(program).attempt(rule, node)
    for node in graph.nodes:
        assert str(table.explain(program, node))
    assert list(table.match(program).refusals())
