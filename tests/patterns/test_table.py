"""Rule tables: how they add up, which match wins, and growth."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from quantc.errors import PatternError
from quantc.ir.program import Program
from quantc.patterns import (
    Match,
    Rule,
    RuleTable,
    const,
    optional,
    predicate,
    result,
    shared,
)
from quantc.patterns import aten as v
from quantc.patterns.fusions import FUSIONS
from tests.support.pattern_graphs import Build, conv_block, table_of, taken


@predicate("even-number-of-users")
def why_not_even(match: Match) -> str | None:
    users = len(match.root.users)
    return None if users % 2 == 0 else f"{match.root.name} has {users} users, an odd number"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: table_of(Rule("r", v.conv), Rule("r", v.relu)), "more than one rule named 'r'"),
        (lambda: FUSIONS + FUSIONS, "conv-bn"),
        (lambda: FUSIONS.without("conv_bn"), "did you mean conv-bn"),
        (lambda: FUSIONS.only("nothing"), "no rule 'nothing'"),
        (lambda: FUSIONS["nothing"], "no rule 'nothing'"),
    ],
)
def test_names_a_table_has_twice_or_not_at_all_are_refused(make: Callable[[], object], message: str) -> None:
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
