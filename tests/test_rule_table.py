"""Rules and tables: which match wins, explanations, JSON, the fusion table, and growth."""

from __future__ import annotations

import copy
import json
import operator
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from quantc.errors import PatternError, UnknownNameError
from quantc.patterns import (
    Match,
    Pattern,
    Rule,
    RuleTable,
    any_of,
    at_least,
    const,
    differs,
    equals,
    number,
    one_of,
    op,
    optional,
    out,
    predicate,
    result,
    shared,
    value,
)
from quantc.patterns import aten as v
from quantc.patterns.dsl import MAX_DEPTH, OpPattern
from quantc.patterns.fusions import FUSIONS
from quantc.patterns.leaves import LiteralValue
from quantc.program import Program
from tests.pattern_graphs import Build


def taken(table: RuleTable, program: Program) -> list[tuple[str, tuple[str, ...]]]:
    """Which rule took which nodes, in graph order."""
    return [(match.rule.name, tuple(node.name for node in match.nodes)) for match in table.match(program)]


def table_of(*rules: Rule) -> RuleTable:
    return RuleTable("table", rules)


@predicate("even-number-of-users")
def why_not_even(match: Match) -> str | None:
    users = len(match.root.users)
    return None if users % 2 == 0 else f"{match.root.name} has {users} users, an odd number"


# -- rules -------------------------------------------------------------------------------------------------------


def test_rules_are_values() -> None:
    def make() -> Rule:
        return Rule(
            "conv-clamp", v.conv >> optional(v.clamp), roles={"x": "act", "out": "act"}, supports=frozenset({"qdq"})
        )

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != replace(make(), roles={"x": "act"})
    assert make().roles["x"] == "act"
    assert pickle.loads(pickle.dumps(make())) == copy.deepcopy(make())  # noqa: S301 - our own bytes
    with pytest.raises(TypeError):
        make().roles["x"] = "weight"  # type: ignore[index]


def test_a_registered_function_goes_by_its_name() -> None:
    assert Rule("r", v.relu, when=why_not_even) == Rule("r", v.relu, when="even-number-of-users")
    assert Rule("r", v.relu, when=why_not_even).conditions == ("even-number-of-users",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule("Conv Clamp", v.conv), "not a name for a rule"),
        (lambda: Rule("r", v.conv, roles={"weight": "weight"}), "binds no such name"),
        (lambda: Rule("r", v.conv, supports=frozenset({"kernels"})), "did you mean kernel"),
        (lambda: Rule("r", v.conv, when="evn-number-of-users"), "did you mean even-number-of-users"),
        (lambda: Rule("r", v.conv, when=(3,)), "give a name or a function"),  # type: ignore[arg-type]
        (lambda: table_of(Rule("r", v.conv), Rule("r", v.relu)), "more than one rule named 'r'"),
        (lambda: FUSIONS + FUSIONS, "conv-bn"),
        (lambda: FUSIONS.without("conv_bn"), "did you mean conv-bn"),
        (lambda: FUSIONS.only("nothing"), "no rule 'nothing'"),
        (lambda: FUSIONS["nothing"], "no rule 'nothing'"),
        (lambda: predicate("even-number-of-users")(lambda match: None), "exists already"),
        (lambda: predicate("Not A Name"), "not a name for a predicate"),
    ],
)
def test_malformed_rules_and_tables(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PatternError) as caught:
        make()
    assert message in str(caught.value)


def test_tables_add_and_subtract() -> None:
    one, two = table_of(Rule("relu", v.relu)), RuleTable("more", (Rule("tanh", v.tanh), Rule("add", v.add)))
    both = one + two
    assert both.names == ("relu", "tanh", "add")
    assert both.name == "table+more"
    assert both.without("add").names == ("relu", "tanh")
    assert both.only("add", "relu").names == ("relu", "add")
    assert "tanh" in both
    assert both["tanh"] == two.rules[0]
    assert [rule.name for rule in both] == list(both.names)
    assert len(both) == 3
    assert both.without("tanh", "add") == replace(one, name="table+more")


# -- who wins ----------------------------------------------------------------------------------------------------


def conv_block() -> tuple[Program, dict[str, fx.Node]]:
    b = Build()
    x, w = b.input("x", 1, 4, 8, 8), b.const("w", 4, 4, 1, 1)
    conv = b("conv2d", x, w)
    sigmoid = b("sigmoid", conv)
    relu = b("relu", sigmoid)
    add = b("add", relu, x)
    return b.done(add), {"conv": conv, "sigmoid": sigmoid, "relu": relu, "add": add}


def test_the_largest_rule_wins_wherever_it_stands() -> None:
    program, _ = conv_block()
    small, large = Rule("relu-add", v.relu >> v.add), Rule("conv-sigmoid-relu", v.conv >> v.sigmoid >> v.relu)
    expected = [("conv-sigmoid-relu", ("conv2d", "sigmoid", "relu"))]
    assert taken(table_of(small, large), program) == expected
    assert taken(table_of(large, small), program) == expected


def test_among_equals_the_longer_reach_then_the_order_of_the_table_decides() -> None:
    program, _ = conv_block()
    one, two = Rule("one", v.sigmoid), Rule("two", v.sigmoid)
    assert taken(table_of(one, two), program) == [("one", ("sigmoid",))]
    assert taken(table_of(two, one), program) == [("two", ("sigmoid",))]
    reaching = Rule("reaching", v.conv >> optional(v.sigmoid))
    assert taken(table_of(one, reaching), program) == [("reaching", ("conv2d", "sigmoid"))]


def test_chains_are_taken_from_the_end() -> None:
    b = Build()
    node = b.input("x")
    for _ in range(5):
        node = b("relu", node)
    table = table_of(Rule("pair", v.relu.named("first") >> v.relu))
    assert taken(table, b.done(node)) == [("pair", ("relu_1", "relu_2")), ("pair", ("relu_3", "relu_4"))]


def test_shared_nodes_stay_free() -> None:
    b = Build()
    halves = b("split", b.input("x", 4), 2)
    left, right = (b.call(operator.getitem, halves, index) for index in range(2))
    program = b.done(b("relu", left), b("relu", right))
    table = table_of(Rule("half-relu", result(shared(v.split)) >> v.relu), Rule("split", v.split))
    assert [name for name, _ in taken(table, program)] == ["split", "half-relu", "half-relu"]


def test_conditions_refuse_with_their_reason_and_other_rules_go_on() -> None:
    program, nodes = conv_block()
    odd = Rule("even", v.relu, when="even-number-of-users")
    plain = Rule("plain", v.relu)
    matches = table_of(odd, plain).match(program)
    assert [match.rule.name for match in matches] == ["plain"]
    assert [str(refusal) for refusal in table_of(odd).match(program).refusals()] == [
        "even at relu: relu has 1 users, an odd number"
    ]
    assert matches.by_node(nodes["relu"]) is matches.matches[0]
    assert matches.by_node(nodes["conv"]) is None
    assert matches.counts() == {"even": 0, "plain": 1}
    assert matches.of("plain") == matches.matches
    assert list(reversed(matches)) == list(matches)[::-1]


def test_a_condition_can_choose_between_orders() -> None:
    b = Build()
    x, y = b.input("x"), b.input("y")
    add = b("add", x, y)
    program = b.done(add)

    def why_not_y_first(match: Match) -> str | None:
        return None if match["a"] is y else "a is not y"

    (match,) = table_of(Rule("r", v.add("a", "b"), when=why_not_y_first)).match(program)
    assert match.bindings == {"a": y, "b": x}


def test_a_condition_that_raises_is_named() -> None:
    program, _ = conv_block()
    table = table_of(Rule("bad", v.relu, when=lambda match: str(match["nothing"])))
    with pytest.raises(PatternError, match="of rule 'bad' failed"):
        table.match(program)


def test_nested_graphs_are_matched() -> None:
    inner = Build()
    p = inner.input("p")
    inner.graph.output(inner("relu", inner("sigmoid", p)))
    b = Build()
    x = b.input("x")
    b.root.add_module("branch", fx.GraphModule(nn.Module(), inner.graph))
    branch = b.graph.get_attr("branch")
    program = b.done(b.call(torch.ops.higher_order.cond, x, branch, branch, [x]), b("relu", x))
    table = table_of(Rule("sigmoid-relu", v.sigmoid >> v.relu), Rule("relu", v.relu))
    assert [name for name, _ in taken(table, program)] == ["relu", "sigmoid-relu"]
    constant = table_of(Rule("c", v.sigmoid(const("c"))))
    assert "p (placeholder)" in str(constant.explain(program, "branch/sigmoid"))


# -- explain -----------------------------------------------------------------------------------------------------


def test_explain_lists_the_winner_then_the_nearest_misses() -> None:
    program, nodes = conv_block()
    table = table_of(
        Rule("sigmoid-relu-add", v.add(v.sigmoid >> v.relu, number("n"))),
        Rule("conv-sigmoid", v.conv >> v.sigmoid),
        Rule("sigmoid-relu", v.sigmoid >> v.relu),
        Rule("sigmoid-tanh", v.sigmoid >> v.tanh),
        Rule("linear-sigmoid", v.linear >> v.sigmoid),
        Rule("pool", v.max_pool),
    )
    told = table.explain(program, nodes["sigmoid"])
    assert told.matched == "conv-sigmoid"
    assert [(row.rule, row.matched, row.progress) for row in told.tried] == [
        ("conv-sigmoid", True, 2),
        ("sigmoid-relu-add", False, 3),
        ("sigmoid-relu", False, 2),
        ("linear-sigmoid", False, 1),
        ("sigmoid-tanh", False, 0),
    ]
    reasons = {row.rule: row.reason for row in told.tried}
    assert "expected a number for n, found x" in reasons["sigmoid-relu-add"]
    assert reasons["sigmoid-relu"] == "it fits, but sigmoid is claimed by conv-sigmoid at sigmoid"
    assert reasons["linear-sigmoid"] == "expected linear, found conv2d"
    assert "feeds relu" in reasons["sigmoid-tanh"]
    assert "1 other rule without sigmoid" in str(told)
    data = json.loads(told.to_json())
    assert data["matched"] == "conv-sigmoid"
    assert data["tried"][2]["place"] == "inner"
    assert table.explain(program, "sigmoid") == told


def test_explain_by_unknown_name_and_of_a_node_no_rule_mentions() -> None:
    program, _ = conv_block()
    with pytest.raises(UnknownNameError, match="no node 'sigmid'"):
        table_of(Rule("relu", v.relu)).explain(program, "sigmid")
    told = table_of(Rule("relu", v.relu)).explain(program, "x")
    assert told.tried == ()
    assert str(told).startswith("x (placeholder): taken by no rule")


def test_explain_a_hub_is_quick() -> None:
    b = Build()
    hub = b("relu", b.input("x"))
    program = b.done(*[b("sigmoid", hub) for _ in range(2000)])
    told = table_of(Rule("relu-sigmoid", v.relu >> v.sigmoid)).explain(program, hub)
    assert told.tried[0].reason == "relu has 2000 users; sigmoid_1 uses it too"


# -- JSON --------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4), st.just(torch.float16)
)
PLAIN = st.one_of(SCALARS, st.lists(SCALARS, max_size=3))
CHECKS = st.one_of(
    PLAIN.map(equals),
    PLAIN.map(differs),
    st.lists(PLAIN, min_size=1, max_size=3).map(lambda values: one_of(*values)),
    st.floats(allow_nan=False).map(at_least),
)
NAMES = st.sampled_from(["x", "y", "w", "naïve"])
TOKENS = st.one_of(NAMES, NAMES.map("{}?".format), NAMES.map("{}*".format), st.sampled_from(["_", "_?", "_*", "xs*?"]))
OPERANDS = st.one_of(
    TOKENS,
    NAMES.map(const),
    NAMES.map("{}?".format).map(number),
    st.builds(value, NAMES, dtype=st.sampled_from(["f32", ("f32", "i8")]), rank=st.sampled_from([(), 4, (2, 3)])),
    PLAIN.map(LiteralValue),
)


def _call(pattern: OpPattern, operands: list[Any], where: Any, name: str | None) -> OpPattern:
    checked = pattern.having(training=where) if where is not None else pattern
    return replace(checked(*operands), name=name)


def _grow(child: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Any]:
    operands = st.lists(st.one_of(OPERANDS, child, st.lists(st.one_of(OPERANDS, child), max_size=2)), max_size=3)
    calls = st.builds(
        _call,
        st.just(op("batch_norm")),
        operands,
        st.one_of(st.none(), CHECKS),
        st.sampled_from([None, "n"]),
    )
    return st.one_of(
        calls,
        st.builds(any_of, child, st.one_of(child, OPERANDS)),
        child.map(shared),
        st.builds(lambda part: part >> optional(v.relu >> v.tanh), child),
        st.builds(lambda part: part >> result(v.split, 1).named("half"), child),
    )


JSON_PATTERNS = st.recursive(st.sampled_from([v.relu, v.conv, out("max")]), _grow, max_leaves=5)


def _as_rule(pattern: Pattern) -> Rule | None:
    try:
        return Rule("rule", pattern, roles={"out": "act"}, when="even-number-of-users", supports=frozenset({"qdq"}))
    except PatternError:
        return None


@settings(max_examples=300, deadline=None)
@given(st.lists(JSON_PATTERNS.map(_as_rule).filter(lambda rule: rule is not None), max_size=3))
def test_json_round_trip_law(rules: list[Rule]) -> None:
    table = RuleTable("tåble", tuple(replace(rule, name=f"r{index}") for index, rule in enumerate(rules)))
    text = table.to_json()
    again = RuleTable.from_json(text)
    assert again == table
    assert hash(again) == hash(table)
    assert again.to_json() == text


def test_unregistered_conditions_cannot_be_written() -> None:
    table = table_of(Rule("r", v.relu, when=lambda match: None))
    with pytest.raises(PatternError, match="register it: @predicate"):
        table.to_json()


def document(**rule: Any) -> str:
    base = {"name": "r", "pattern": {"op": ["relu"]}}
    return json.dumps({"format": "quantc-rules", "version": 1, "name": "t", "rules": [{**base, **rule}]})


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ("not JSON",)),
        ("[]", ("an object", "table")),
        (b"\xff\xfe\xff", ("not JSON",)),
        ('{"a": 1, "a": 2}', ("given twice",)),
        ('{"format": NaN}', ("NaN",)),
        ('{"format": "quantc-rules"}', ("'version' is missing",)),
        ('{"format": "quantc-rules", "version": 2, "name": "t", "rules": []}', ("version 2",)),
        ('{"format": "quantc-rules", "version": true, "name": "t", "rules": []}', ("version True",)),
        ('{"format": "quantc-rules", "version": 1, "name": "t", "rules": {}}', ("a list", "rules")),
        ('{"format": "quantc-rules", "version": 1, "name": 1, "rules": []}', ("a string", "name")),
        (document(name=3), ("a string", "rules[0].name")),
        (document(name="A b"), ("not a name", "rules[0]")),
        (document(color="red"), ("no field 'color'", "rules[0].color")),
        (document(pattern="x"), ("an operand", "rules[0].pattern")),
        (document(pattern=3), ("an object", "rules[0].pattern")),
        (document(pattern={}), ("no kind of pattern", "rules[0].pattern")),
        (document(pattern={"op": "relu"}), ("a list", "rules[0].pattern.op")),
        (document(pattern={"op": ["rely"]}), ("did you mean relu", "rules[0].pattern")),
        (document(pattern={"op": ["relu"], "arg": []}), ("did you mean args", "rules[0].pattern.arg")),
        (document(pattern={"op": ["relu"], "args": ["2x"]}), ("'2x'", "rules[0].pattern.args[0]")),
        (document(pattern={"op": ["relu"], "args": [{"const": 1}]}), ("a string", "rules[0].pattern.args[0].const")),
        (document(pattern={"op": ["relu"], "args": [{"number": "n", "rank": [1]}]}), ("rank", "pattern.args[0]")),
        (document(pattern={"op": ["relu"], "where": {"y": {"equals": 1}}}), ("no argument 'y'", "rules[0].pattern")),
        (document(pattern={"op": ["clamp"], "where": {"min": {"equal": 1}}}), ("did you mean equals", "where.min")),
        (document(pattern={"op": ["clamp"], "where": {"min": {}}}), ("exactly one", "where.min")),
        (document(pattern={"op": ["clamp"], "where": {"min": {"equals": {"dtype": "x"}}}}), ("not a value", "equals")),
        (document(pattern={"op": ["relu"], "name": "out"}), ("cannot be bound", "rules[0].pattern")),
        (document(pattern={"chain": [{"op": ["relu"]}]}), ("two steps", "rules[0].pattern")),
        (document(pattern={"chain": [{"op": ["relu"]}, "x"]}), ("is a value", "rules[0].pattern.chain")),
        (document(pattern={"result": {"op": ["relu"]}, "index": 0}), ("single tensor", "rules[0].pattern")),
        (document(pattern={"result": {"op": ["max"]}, "index": "0"}), ("whole number", "rules[0].pattern.index")),
        (document(pattern={"optional": {"op": ["relu"]}}), ("without any node", "rules[0]")),
        (document(roles={"y": "act"}), ("binds no such name", "rules[0]")),
        (document(roles={"out": 3}), ("a string", "rules[0].roles.out")),
        (document(when=["even-number-of-user"]), ("did you mean even-number-of-users", "rules[0]")),
        (document(supports=["qd"]), ("did you mean qdq", "rules[0]")),
        ('{"a":' * 100_000, ("nested too deeply",)),
    ],
)
def test_malformed_json_names_the_field(text: str | bytes, parts: tuple[str, ...]) -> None:
    with pytest.raises(PatternError) as caught:
        RuleTable.from_json(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 250, 100_000])
def test_deep_json_is_an_error_not_a_crash(depth: int) -> None:
    head, tail = document(pattern="HERE").split('"HERE"')
    nested = '{"shared":' * depth + '{"op":["relu"]}' + "}" * depth
    with pytest.raises(PatternError, match=r"too deeply|too large"):
        RuleTable.from_json(head + nested + tail)


# -- fusions -----------------------------------------------------------------------------------------------------


def fused(build: Callable[[Build], fx.Node]) -> tuple[list[str], str]:
    """The fusions found in a small program, and why the others were not."""
    b = Build()
    program = b.done(build(b))
    matches = FUSIONS.match(program)
    return [match.rule.name for match in matches], "\n".join(str(refusal) for refusal in matches.refusals())


def norm(b: Build, x: fx.Node, channels: int, *, training: bool = False, stats: bool = True) -> fx.Node:
    mean, var = (b.const(name, channels) if stats else None for name in ("mean", "var"))
    gamma, beta = b.const("gamma", channels), b.const("beta", channels)
    return b("batch_norm", x, gamma, beta, mean, var, training, 0.1, 1e-5, False)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
def test_conv_bn_is_found_with_all_its_operands(kind: str, dims: int) -> None:
    b = Build()
    x, w, bias = b.input("x", 2, 4, *[8] * dims), b.const("w", 4, 4, *[3] * dims), b.const("bias", 4)
    conv = b(f"{kind}{dims}d", x, w, bias)
    bn = norm(b, conv, 4)
    (match,) = FUSIONS.match(b.done(bn))
    assert match.rule.name == "conv-bn"
    assert match.nodes == (conv, bn)
    assert {name: node.name for name, node in match.bindings.items()} == {
        "conv": f"{kind}{dims}d",
        "x": "x",
        "w": "w",
        "b": "bias",
        "gamma": "gamma",
        "beta": "beta",
        "mean": "mean",
        "var": "var",
    }


def conv_of(b: Build, *, constant: bool = True) -> fx.Node:
    x = b.input("x", 2, 4, 8, 8)
    return b("conv2d", x, b.const("w", 4, 4, 1, 1) if constant else b.input("w", 4, 4, 1, 1))


def linear_of(b: Build, *lead: int) -> fx.Node:
    return b("linear", b.input("x", *lead, 4), b.const("w", 6, 4))


@pytest.mark.parametrize(
    ("build", "rules", "reason"),
    [
        (lambda b: norm(b, conv_of(b), 4), ["conv-bn"], ""),
        (lambda b: norm(b, linear_of(b, 2), 6), ["linear-bn"], ""),
        (lambda b: norm(b, conv_of(b), 4, training=True), [], "training = True, wanted training == False"),
        (lambda b: norm(b, conv_of(b), 4, stats=False, training=True), [], "training = True"),
        (lambda b: norm(b, conv_of(b, constant=False), 4), [], "expected a constant tensor for w, found w"),
        (lambda b: norm(b, linear_of(b, 2, 6), 6), [], "its channels lie on axis 2, not 1"),
        (lambda b: norm(b, b("relu", conv_of(b)), 4), [], "found relu"),
        (lambda b: b("mul", conv_of(b), 2), ["conv-mul"], ""),
        (lambda b: b("mul", b.const("c", 4, 1, 1), conv_of(b)), ["conv-mul"], ""),
        (lambda b: b("mul", conv_of(b), b.const("c", 1, 4, 1, 1)), ["conv-mul"], ""),
        (lambda b: b("mul", conv_of(b), b.const("c", 8)), [], "does not go by the 4 channels"),
        (lambda b: b("mul", conv_of(b), b.const("c", 1, 1, 1, 1, 1)), [], "has 5 axes"),
        (lambda b: b("mul", conv_of(b), b.const("c", 4, 1, 1, dtype=torch.float64)), [], "into torch.float64"),
        (lambda b: b("add", conv_of(b), 1.5), ["conv-add"], ""),
        (lambda b: b("add", conv_of(b), b.const("c", 4, 1, 1), alpha=2), [], "alpha = 2, wanted alpha == 1"),
        (lambda b: b("add", conv_of(b), b.input("y", 2, 4, 8, 8)), [], "expected a constant tensor for c"),
        (lambda b: b("sub", conv_of(b), b.const("c", 4, 1, 1)), ["conv-sub"], ""),
        (lambda b: b("sub", b.const("c", 4, 1, 1), conv_of(b)), [], "found c"),
        (lambda b: b("div", conv_of(b), 3), ["conv-div"], ""),
        (lambda b: b("add", linear_of(b, 2, 3), b.const("c", 6)), ["linear-add"], ""),
        (lambda b: b("mul", linear_of(b, 2, 3), b.const("c", 3, 1)), [], "does not go by the 6 channels"),
        (lambda b: b("div", linear_of(b, 2, 3), b.const("c")), ["linear-div"], ""),
    ],
)
def test_fusions_found_and_refused(build: Callable[[Build], fx.Node], rules: list[str], reason: str) -> None:
    names, refusals = fused(build)
    assert names == rules
    assert reason in refusals


def test_nothing_is_fused_into_a_producer_with_two_users() -> None:
    b = Build()
    conv = conv_of(b)
    program = b.done(norm(b, conv, 4), b("neg", conv))
    assert len(FUSIONS.match(program)) == 0
    assert "conv2d has 2 users; neg uses it too" in str(FUSIONS.explain(program, "batch_norm"))


def test_batch_norm_without_statistics_is_refused() -> None:
    b = Build()
    conv = conv_of(b)
    bn = b.graph.create_node(
        "call_function", torch.ops.aten.batch_norm.default, (conv, None, None, None, None, False, 0.1, 1e-5, False)
    )
    told = FUSIONS.explain(b.done(bn), bn)
    assert told.tried[0].reason == "expected a constant tensor for mean, found nothing"


def test_unknown_shapes_are_refused_where_they_matter() -> None:
    b = Build()
    x, w = b.input("x"), b.const("w", 4, 4, 1, 1)
    conv = b("conv2d", x, w)
    scaled = b("mul", b("conv2d", norm(b, conv, 4), w), b.const("c", 4, 1, 1))
    program = b.done(scaled)
    assert [match.rule.name for match in FUSIONS.match(program)] == ["conv-mul"]
    assert "the shape of conv2d is unknown" in str(FUSIONS.explain(program, "batch_norm"))


def test_the_fusion_table_survives_json() -> None:
    assert RuleTable.from_json(FUSIONS.to_json()) == FUSIONS


# -- growth ------------------------------------------------------------------------------------------------------


def residual_chain(blocks: int) -> Program:
    b = Build()
    node = b.input("x")
    w = b.const("w", 4, 4, 1, 1)
    stats = [b.const(name, 4) for name in ("gamma", "beta", "mean", "var")]
    for _ in range(blocks):
        conv = b("conv2d", node, w)
        bn = b("batch_norm", conv, *stats, False, 0.1, 1e-5, False)
        node = b("add", b("relu", bn), node)
    return b.done(node)


def star(points: int) -> Program:
    b = Build()
    hub = b("sigmoid", b.input("x"))
    return b.done(b("cat", [b("mul", hub, hub) for _ in range(points)]))


def wide_table() -> RuleTable:
    producers = {"conv": v.conv, "linear": v.linear, "add": v.add, "mul": v.mul, "bn": v.batch_norm("x")}
    consumers = {"clamp": v.clamp, "act": v.activation, "silu": v.silu, "sigmoid": v.sigmoid, "gelu": v.gelu}
    pairs = [Rule(f"{p}-{c}", producers[p] >> consumers[c]) for p in producers for c in consumers]
    blocks = [
        Rule("conv-bn-clamp-add", v.add(v.conv >> v.batch_norm("_") >> optional(v.clamp), "y")),
        Rule("conv-bn", v.conv >> v.batch_norm("_")),
        Rule("hub", v.mul(v.sigmoid("x"), v.sigmoid("x"))),
    ]
    singles = [Rule(name, pattern) for name, pattern in (producers | consumers).items()]
    return RuleTable("wide", (*singles, *pairs, *blocks))


@pytest.mark.parametrize(("make", "rule"), [(residual_chain, "conv-bn-clamp-add"), (star, "mul")])
def test_matching_grows_linearly(make: Callable[[int], Program], rule: str) -> None:
    table = wide_table()
    seconds = {}
    for size in (500, 4000):
        program = make(size)
        assert table.match(program).counts()[rule] == size
        seconds[size] = min(_timed(table, program) for _ in range(5))
    assert seconds[4000] / seconds[500] < 8 * 2.5  # quadratic would be 64


def _timed(table: RuleTable, program: Program) -> float:
    start = time.process_time()
    table.match(program)
    return time.process_time() - start
