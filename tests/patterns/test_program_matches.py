"""The matches of a table in a program: by node, by rule, counted, and what was refused."""

from __future__ import annotations

import pytest

from quantc.errors import PatternError
from quantc.patterns import MatchSet, Rule, any_of, optional
from quantc.patterns import aten as v
from quantc.patterns.program_matches import Index
from quantc.patterns.rule_matcher import Admission
from tests.support.pattern_graphs import Build, conv_block, table_of


def two_rules() -> MatchSet:
    program, _ = conv_block()
    return table_of(Rule("relu-add", v.relu >> v.add), Rule("conv", v.conv), Rule("tanh", v.tanh)).match(program)


def test_matches_come_in_graph_order_and_reversed_from_the_end() -> None:
    matches = two_rules()
    assert [match.rule.name for match in matches] == ["conv", "relu-add"]
    assert [match.rule.name for match in reversed(matches)] == ["relu-add", "conv"]
    assert len(matches) == 2
    assert str(matches).splitlines() == [
        "table: 2 matches",
        "  conv at conv2d (conv2d)",
        "  relu-add at add (relu, add)",
    ]


def test_a_node_knows_its_match_and_a_rule_its_matches() -> None:
    matches = two_rules()
    node = matches.program.node
    assert matches.by_node(node("relu")) is matches.by_node(node("add"))
    assert matches.by_node(node("sigmoid")) is None
    assert [match.root.name for match in matches.of("tanh", "relu-add")] == ["add"]
    assert matches.counts() == {"relu-add": 1, "conv": 1, "tanh": 0}
    with pytest.raises(PatternError, match="'cnv'"):
        matches.of("cnv")


def test_refusals_come_from_unclaimed_nodes_and_the_rules_asked_for() -> None:
    b = Build()
    first = b("relu", b.input("x"))
    program = b.done(b("tanh", first), b("relu", first))
    matches = table_of(Rule("relu-tanh", v.relu >> v.tanh), Rule("sigmoid-relu", v.sigmoid >> v.relu)).match(program)
    assert [str(refusal) for refusal in matches.refusals()] == [
        "sigmoid-relu at relu: expected sigmoid, found x (placeholder)",
        "relu-tanh at tanh: relu has 2 users; relu_1 uses it too",
        "sigmoid-relu at relu_1: expected sigmoid, found relu",
    ]
    assert [refusal.node.name for refusal in matches.refusals(["relu-tanh"])] == ["tanh"]
    with pytest.raises(PatternError, match="'nothing'"):
        list(matches.refusals(["nothing"]))


def test_refusals_know_what_was_left_out_of_the_matching() -> None:
    program, nodes = conv_block()
    admission = Admission({nodes["relu"]: "kept for itself"})
    matches = table_of(Rule("relu-add", v.relu >> v.add)).match(program, admission)
    assert len(matches) == 0
    assert [refusal.reason for refusal in matches.refusals()] == ["relu is kept for itself"]


def test_candidates_are_calls_fed_by_what_the_rule_needs_last_first() -> None:
    b = Build()
    x = b.input("x")
    one = b("relu", x)
    two = b("tanh", one)
    three = b("relu", two)
    four = b("sigmoid", b("tanh", x))
    program = b.done(three, four)
    index = Index.of(program.graph)
    assert index.candidates(Rule("relu", v.relu)) == [three, one]
    assert index.candidates(Rule("tanh-relu", v.tanh >> v.relu)) == [three]
    assert index.candidates(Rule("ends", any_of(v.relu, v.tanh) >> optional(v.sigmoid))) == [
        four,
        four.args[0],
        three,
        two,
        one,
    ]
    assert index.candidates(Rule("gelu", v.gelu)) == []
    again = b("relu", four)
    assert Index.of(program.graph).candidates(Rule("relu", v.relu)) == [again, three, one]
    twice = b("sigmoid", b("tanh", x))
    assert Index.of(program.graph).candidates(Rule("sigmoid", v.sigmoid)) == [twice, four], "fed by the same op"
    assert x not in index.positions
