"""Explanations: every rule that names a node's op, with how far it came and why it stopped."""

from __future__ import annotations

import json

import pytest

from quantc.errors import QuantcError, UnknownNameError
from quantc.ir.program import Program
from quantc.ir.sites import Origin
from quantc.patterns import Rule, number, optional, shared
from quantc.patterns import aten as v
from quantc.patterns.explain_match import PatternPosition, Tried, explain_among, resolve_node
from tests.support.pattern_graphs import Build, conv_block, table_of


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
    with pytest.raises(UnknownNameError, match="unknown node 'sigmid'"):
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


def test_the_rule_that_took_a_node_says_what_else_it_took() -> None:
    program, nodes = conv_block()
    table = table_of(Rule("conv-sigmoid", v.conv >> v.sigmoid))
    (row,) = explain_among(table.match(program), nodes["conv"]).tried
    assert (row.matched, row.place, row.root, row.reason) == (
        True,
        PatternPosition.INNER,
        "sigmoid",
        "matched conv2d, sigmoid",
    )
    assert row.to_data()["cause"] is None
    (row,) = explain_among(table.match(program), "sigmoid").tried
    assert row.place is PatternPosition.ROOT


def test_a_row_counts_the_nodes_that_fitted_if_some_did_not() -> None:
    near = Tried("pair", False, PatternPosition.INNER, "relu", "no", 1, 2, "relu")
    assert str(near) == "pair (root relu): no [1 of 2 nodes fitted]"
    whole = Tried("pair", False, PatternPosition.ROOT, "relu", "no", 2, 2, "relu")
    assert str(whole) == "pair: no"


def test_a_match_that_only_looks_at_a_node_does_not_count_as_a_try() -> None:
    b = Build()
    relu = b("relu", b.input("x"))
    program = b.done(b("tanh", relu), b("neg", relu))
    table = table_of(Rule("looks", shared(v.relu) >> v.tanh))
    (row,) = table.explain(program, relu).tried
    assert not row.matched
    assert row.reason.startswith("relu cannot end this rule, and it feeds tanh, neg")


def test_a_rule_that_lost_to_choices_elsewhere_says_who_won() -> None:
    program, _ = conv_block()
    table = table_of(Rule("large", v.conv >> v.sigmoid >> v.relu), Rule("small", v.relu >> v.add))
    told = table.explain(program, "add")
    assert told.matched is None
    assert told.tried[0].reason == "it fits, but relu is claimed by large at relu"
    assert told.tried[0].cause is not None
    assert told.tried[0].cause.kind == "claimed"


def module_of_two_ops() -> Program:
    program, nodes = conv_block()
    program.origins[nodes["conv"]] = Origin("block.conv", "Conv2d")
    program.origins[nodes["sigmoid"]] = Origin("block.gate", "Gate")
    program.origins[nodes["relu"]] = Origin("block.gate", "Gate")
    return program


def test_a_node_goes_by_the_module_whose_one_op_it_is() -> None:
    program = module_of_two_ops()
    assert resolve_node(program, "block.conv") is program.node("conv2d")
    assert resolve_node(program, program.node("relu")) is program.node("relu")
    with pytest.raises(UnknownNameError, match="module of 2 ops") as caught:
        resolve_node(program, "block.gate")
    assert caught.value.advice == "ask for one: sigmoid, relu"
    with pytest.raises(UnknownNameError) as caught:
        resolve_node(program, "block.con")
    assert "the module block.conv" in str(caught.value.advice)


@pytest.mark.parametrize(("name", "message"), [("", "name of the node is empty"), (3, "3 is not a node")])
def test_what_is_no_node_is_refused(name: str, message: str) -> None:
    program, _ = conv_block()
    with pytest.raises(QuantcError, match=message):
        resolve_node(program, name)


def test_optional_ends_are_found_downstream() -> None:
    program, nodes = conv_block()
    table = table_of(Rule("reach", v.conv >> optional(v.sigmoid) >> v.tanh))
    (row,) = table.explain(program, nodes["sigmoid"]).tried
    assert row.reason.startswith("sigmoid cannot end this rule")
    assert (row.progress, row.required) == (0, 2)
