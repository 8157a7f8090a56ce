"""The words of the language, and the matcher against a checker that knows nothing of it."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from quantc.errors import PatternError, UnknownNameError
from quantc.patterns import (
    Match,
    Pattern,
    Refusal,
    Rule,
    RuleTable,
    any_of,
    at_least,
    at_most,
    const,
    differs,
    equals,
    number,
    one_of,
    op,
    optional,
    out,
    result,
    shared,
    value,
)
from quantc.patterns import aten as v
from quantc.patterns.dsl import Operand, OpPattern, Result
from quantc.patterns.leaves import ANYTHING, LiteralValue
from quantc.patterns.match import Matcher
from quantc.program import Program
from tests.pattern_graphs import Build
from tests.slow_match import COMMUTING, op_of, solutions


def attempt(pattern: Pattern, program: Program, node: fx.Node) -> Match | Refusal:
    return Matcher(program).attempt(Rule("rule", pattern), node)


def found(pattern: Pattern, program: Program, node: fx.Node) -> Match:
    outcome = attempt(pattern, program, node)
    assert isinstance(outcome, Match), str(outcome)
    return outcome


def refused(pattern: Pattern, program: Program, node: fx.Node) -> str:
    outcome = attempt(pattern, program, node)
    assert isinstance(outcome, Refusal), str(outcome)
    return outcome.reason


# -- values ------------------------------------------------------------------------------------------------------


def test_patterns_are_values() -> None:
    conv = op("conv2d", args="x w b?")
    again = op("conv2d", args="x w b?")
    assert conv == again
    assert hash(conv) == hash(again)
    assert conv != op("conv2d", args="x w b")
    assert len({conv >> v.relu, again >> v.relu}) == 1
    assert op("relu", where={}) == op("aten.relu.default")
    with pytest.raises(AttributeError):
        conv.name = "other"  # type: ignore[misc]


def test_true_is_not_one() -> None:
    assert op("dropout", where={"train": True}) != op("dropout", where={"train": 1})
    assert op("add")("x", True) != op("add")("x", 1)
    assert op("add")("x", 1.0) == op("add")("x", 1)


def test_patterns_print_as_they_are_written() -> None:
    pattern = v.add(op("conv1d", "conv2d", args="x w b?") >> optional(op("relu", args="_")), const("y"))
    assert str(pattern) == "add(conv1d|conv2d(x, w, b?) >> optional(relu(_)), const(y))[alpha == 1]"
    assert str(result(v.split.named("s"), 1)) == "result(s=split|split_sizes(x), 1)"
    assert repr(op("conv2d", where={"groups": one_of(1, 2)})) == "conv2d[groups in (1, 2)]"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: op("con2d"), "conv2d"),
        (op, "at least one op"),
        (lambda: op("torch.ops.load_library"), "no op"),
        (lambda: op("relu", args="x y"), "relu takes 1 arguments"),
        (lambda: op("relu", args="2x"), "cannot name an operand"),
        (lambda: op("relu", args="out"), "cannot name an operand"),
        (lambda: op("relu").named("out"), "cannot be bound"),
        (lambda: op("relu", "clamp", where={"min": 0}), "relu has no argument 'min'"),
        (lambda: op("conv2d", where={"group": 1}), "groups"),
        (lambda: op("clamp", where={"min": float("nan")}), "NaN"),
        (lambda: op("clamp", where={"min": object()}), "cannot be compared"),
        (lambda: op("clamp", where={"min": at_least("a")}), "needs a number"),  # type: ignore[arg-type]
        (lambda: op("clamp", where={"min": one_of()}), "at least one value"),
        (lambda: out("relu", 0), "single tensor"),
        (lambda: v.relu >> v.add(v.relu, "y"), "already relu"),
        (lambda: v.relu >> v.mul(const("c"), "y"), "already const(c)"),
        (lambda: v.relu >> "x", "cannot follow"),
        (lambda: v.relu >> any_of("x", v.relu), "is a value"),
        (lambda: optional("x"), "takes a pattern"),  # type: ignore[arg-type]
        (any_of, "at least one pattern"),
        (lambda: value("x", dtype="float32"), "f32"),
        (lambda: const("xs*"), "both a list and a const"),
        (lambda: Rule("r", optional(v.relu)), "without any node"),
        (lambda: Rule("r", any_of("x", v.relu)), "without any node"),
        (lambda: Rule("r", shared(v.relu)), "claim nothing"),
        (lambda: Rule("r", "relu"), "not a pattern"),  # type: ignore[arg-type]
    ],
)
def test_malformed_patterns_say_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        make()
    assert message in str(caught.value)


def test_huge_patterns_are_refused_not_crashed_on() -> None:
    def deeper(pattern: Pattern) -> Pattern:
        return pattern >> v.relu

    def wider(pattern: Pattern) -> Pattern:
        return v.add(pattern, pattern)

    def nested(pattern: Pattern) -> Pattern:
        return v.relu(pattern)

    def grown(grow: Callable[[Pattern], Pattern]) -> Pattern:
        pattern: Pattern = v.relu
        for _ in range(10_000):
            pattern = grow(pattern)
        return pattern

    for grow in (deeper, wider, nested):
        with pytest.raises(PatternError, match="too large"):
            grown(grow)


def test_many_optional_steps_compile_in_linear_time() -> None:
    pattern: Pattern = v.conv
    for _ in range(15):
        pattern = pattern >> optional(shared(v.relu) >> v.sigmoid)
    assert Rule("rule", pattern).compiled.required == 1


# -- operands ----------------------------------------------------------------------------------------------------


def test_operands_bind_by_position_or_keyword_and_may_be_absent() -> None:
    b = Build()
    x, w, bias = b.input("x", 1, 4, 8, 8), b.const("w", 4, 4, 1, 1), b.const("bias", 4)
    plain = b("conv2d", x, w)
    full = b("conv2d", plain, w, bias)
    keyword = b("conv2d", full, w, bias=bias)
    program = b.done(keyword)
    assert found(v.conv, program, plain).bindings == {"x": x, "w": w, "b": None}
    assert found(v.conv, program, full)["b"] is bias
    assert found(v.conv, program, keyword)["b"] is bias
    assert found(v.conv("x", "w", None), program, plain)["out"] is plain
    assert "found bias" in refused(v.conv("x", "w", None), program, full)
    assert refused(v.conv("x", "w", "b"), program, plain) == "expected a tensor for b, found nothing"
    with pytest.raises(UnknownNameError, match="binds no 'weight'"):
        found(v.conv, program, plain)["weight"]
    with pytest.raises(PatternError, match="not a node"):
        found(v.conv, program, plain).node("b")


def test_constants_numbers_and_literals() -> None:
    b = Build()
    x, c = b.input("x", 4), b.const("c", 4)
    product = b("mul", x, c)
    shift = b("add", product, 3)
    program = b.done(shift)
    assert found(v.mul("y", const("k")), program, product).bindings == {"y": x, "k": c}
    assert found(v.mul(const("k"), "y"), program, product).bindings == {"k": c, "y": x}
    assert refused(v.mul(const("k"), const("l")), program, product).startswith("expected a constant tensor for k")
    assert found(v.add("y", number("n")), program, shift)["n"] == 3
    assert found(v.add("y", 3.0), program, shift)["y"] is product
    assert "expected 4" in refused(v.add("y", 4), program, shift)
    assert "expected True" in refused(v.add("y", True), program, shift)
    assert found(v.add("y", any_of(const("n"), number("n"))), program, shift)["n"] == 3


def test_a_size_is_not_a_tensor() -> None:
    b = Build()
    x = b.input("x")
    size = b("sym_size", x, 0)
    doubled = b.call(operator.mul, size, 2)
    scaled = b("mul", x, doubled)
    program = b.done(scaled)
    assert "expected a tensor for y, found mul" in refused(v.mul("x", "y"), program, scaled)


def test_dtype_and_rank_of_operands() -> None:
    b = Build()
    x = b.input("x", 2, 3)
    untyped = b.input("untyped")
    relu, other = b("relu", x), b("relu", untyped)
    program = b.done(relu, other)
    assert found(v.relu(value("x", dtype="f32", rank=2)), program, relu)["x"] is x
    assert found(v.relu(value("x", dtype=(torch.float16, torch.float32))), program, relu)["x"] is x
    assert "x (placeholder) is f32[2,3], wanted rank 4" in refused(v.relu(value("x", rank=4)), program, relu)
    assert "wanted i8" in refused(v.relu(value("x", dtype="i8")), program, relu)
    assert "is unknown" in refused(v.relu(value("x", rank=4)), program, other)


def test_list_operands() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    relu = b("relu", x)
    joined = b("cat", [relu, y], 1)
    program = b.done(joined)
    assert found(v.cat, program, joined)["xs"] == (relu, y)
    match = found(op("cat")([v.relu("x"), "y"]), program, joined)
    assert match.bindings == {"x": x, "y": y}
    assert match.nodes == (relu, joined)
    assert "a list of 3" in refused(op("cat")(["x", "y", "z"]), program, joined)
    assert refused(op("cat")([v.sigmoid, "y"]), program, joined) == "expected sigmoid, found relu"


# -- attributes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "fits"),
    [
        ({"groups": 2}, True),
        ({"groups": equals(1)}, False),
        ({"groups": differs(1)}, True),
        ({"groups": one_of(1, 2)}, True),
        ({"groups": at_least(2), "stride": 1}, True),
        ({"groups": at_most(1)}, False),
        ({"padding": 1}, True),
        ({"padding": (1, 1)}, True),
        ({"padding": (1, 2)}, False),
        ({"padding": at_least(1)}, True),
        ({"padding": at_least(2)}, False),
        ({"dilation": None}, False),
    ],
)
def test_attribute_checks_see_defaults_and_lists(check: dict[str, object], fits: bool) -> None:
    b = Build()
    x, w = b.input("x", 1, 4, 8, 8), b.const("w", 4, 2, 3, 3)
    conv = b("conv2d", x, w, None, padding=[1, 1], groups=2)
    outcome = attempt(op("conv2d", where=check), b.done(conv), conv)
    assert isinstance(outcome, Match) is fits
    if isinstance(outcome, Refusal):
        assert outcome.reason.startswith("conv2d has ")


def test_computed_attributes_are_refused_by_every_check() -> None:
    b = Build()
    x = b.input("x")
    clamp = b("clamp", x, b("sym_size", x, 0))
    program = b.done(clamp)
    assert "computed" in refused(op("clamp", where={"min": differs(0)}), program, clamp)


def test_dropout_mode() -> None:
    b = Build()
    off = b("dropout", b.input("x"), 0.5, False)
    on = b("dropout", off, 0.5, True)
    program = b.done(on)
    pattern = op("dropout", where={"train": False})
    assert found(pattern, program, off).root is off
    assert refused(pattern, program, on) == "dropout_1 has train = True, wanted train == False"


# -- shape of the match ------------------------------------------------------------------------------------------


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


def test_a_perverse_pattern_gives_up() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    layer = [b("add", x, y) for _ in range(32)]
    while len(layer) > 1:
        layer = [b("add", left, right) for left, right in zip(layer[::2], layer[1::2], strict=True)]
    program = b.done(*layer)
    names = (f"n{index}" for index in itertools.count())
    pattern: list[Operand] = [op("add")("x", "y").named(next(names)) for _ in range(31)]
    pattern.append(op("add")("x", v.relu))
    while len(pattern) > 1:
        pattern = [
            op("add")(left, right).named(next(names)) for left, right in zip(pattern[::2], pattern[1::2], strict=True)
        ]
    assert isinstance(pattern[0], Pattern)
    reason = refused(pattern[0], program, layer[0])
    assert "gave up after 20000 steps" in reason


# -- laws --------------------------------------------------------------------------------------------------------

UNARY = ("relu", "sigmoid")
LEAVES = st.sampled_from(["_", "x", "y"]).map(lambda name: ANYTHING if name == "_" else value(name))
NAMES = st.sampled_from([None, None, None, "n", "m"])


def _op_pattern(names: tuple[str, ...], operands: tuple[Operand, ...], name: str | None) -> OpPattern:
    return replace(op(*names)(*operands), name=name)


def _steps(child: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
    """Patterns one level up from `child`."""
    operands = st.one_of(LEAVES, st.just(const("c")), child)
    unary = st.builds(_op_pattern, st.sampled_from([("relu",), UNARY]), st.tuples(operands), NAMES)
    binary = st.builds(
        _op_pattern, st.sampled_from([("add",), ("mul", "sub"), ("sub",)]), st.tuples(operands, operands), NAMES
    )
    open_op = st.builds(_op_pattern, st.sampled_from([("relu",), ("add",), UNARY]), st.tuples(LEAVES), NAMES)
    chain = st.builds(operator.rshift, child, st.one_of(open_op, open_op.map(optional), open_op.map(shared)))
    return st.one_of(unary, binary, chain, st.builds(any_of, child, child), child.map(shared))


PATTERNS = st.recursive(
    st.builds(_op_pattern, st.sampled_from([("relu",), ("add",), UNARY, COMMUTING]), st.tuples(LEAVES), NAMES),
    _steps,
    max_leaves=4,
)


def _is_rule(pattern: Pattern) -> bool:
    try:
        Rule("rule", pattern)
    except PatternError:
        return False
    return True


ROOTED = PATTERNS.filter(_is_rule)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    b = Build()
    values = [b.input("p"), b.input("q"), b.const("k")]
    for _ in range(draw(st.integers(2, 9))):
        kind = draw(st.sampled_from(["relu", "sigmoid", "add", "mul", "sub", "scaled", "keyword"]))
        left, right = (draw(st.sampled_from(values[-5:])) for _ in range(2))
        if kind in UNARY:
            values.append(b(kind, left))
        elif kind == "scaled":
            values.append(b("add", left, right, alpha=2))
        elif kind == "keyword":
            values.append(b("add", left, other=right))
        else:
            values.append(b(kind, left, right))
    dead_ends = [node for node in values if not node.users and node.op == "call_function"]
    return b.done(*dead_ends, *draw(st.lists(st.sampled_from(values), max_size=1)))


@settings(max_examples=400, deadline=None)
@given(ROOTED, programs())
def test_the_matcher_finds_a_match_exactly_where_there_is_one(pattern: Pattern, program: Program) -> None:
    for node in program.graph.nodes:
        expected = solutions(pattern, node)
        outcome = attempt(pattern, program, node)
        if isinstance(outcome, Match):
            assert any(one.is_like(outcome) for one in expected), (
                f"{pattern} at {node}: {outcome} is not among {expected}"
            )
        else:
            assert not expected, f"{pattern} at {node}: {outcome}, yet {expected[0]} fits"
            assert outcome.reason


@settings(max_examples=200, deadline=None)
@given(st.lists(ROOTED, min_size=1, max_size=4), programs())
def test_table_matches_are_true_apart_and_as_many_as_possible(patterns: list[Pattern], program: Program) -> None:
    table = RuleTable("random", tuple(Rule(f"r{index}", pattern) for index, pattern in enumerate(patterns)))
    matches = table.match(program)
    claimed: set[fx.Node] = set()
    for match in matches:
        assert any(one.is_like(match) for one in solutions(match.rule.pattern, match.root))
        assert claimed.isdisjoint(match.nodes)
        assert all(matches.by_node(node) is match for node in match.nodes)
        claimed.update(match.nodes)
    for rule, node in itertools.product(table, program.graph.nodes):
        for one in solutions(rule.pattern, node):
            assert not claimed.isdisjoint(one.claimed), f"{rule} fits at {node}, but nothing took it"
    again = table.match(program)
    assert [(m.rule, m.root, m.nodes, m.bindings) for m in again] == [
        (m.rule, m.root, m.nodes, m.bindings) for m in matches
    ]


@settings(max_examples=200, deadline=None)
@given(ROOTED, programs(), st.data())
def test_swapping_the_operands_of_commuting_ops_changes_nothing(
    pattern: Pattern, program: Program, data: st.DataObject
) -> None:
    before = {node: isinstance(attempt(pattern, program, node), Match) for node in program.graph.nodes}
    for node in program.graph.nodes:
        if op_of(node) in COMMUTING and len(node.args) == 2 and not node.kwargs and data.draw(st.booleans()):
            node.args = node.args[::-1]
    after = {node: isinstance(attempt(pattern, program, node), Match) for node in program.graph.nodes}
    assert before == after


def test_result_patterns_name_their_node() -> None:
    named = result(v.split, 0).named("half")
    assert isinstance(named, Result)
    assert named.name == "half"
    assert LiteralValue([1, 2]) == LiteralValue((1, 2))
