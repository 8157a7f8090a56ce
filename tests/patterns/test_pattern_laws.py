"""Laws of matching over random patterns and graphs, with `slow_match` as the judge."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from quantc.errors import PatternError
from quantc.ir.program import Program
from quantc.patterns import (
    Match,
    Pattern,
    Rule,
    RuleTable,
    any_of,
    const,
    op,
    optional,
    shared,
    value,
)
from quantc.patterns.dsl import Operand, OpPattern
from quantc.patterns.operand_patterns import ANYTHING
from tests.support.pattern_graphs import Build, attempt
from tests.support.slow_match import COMMUTING, op_of, solutions

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


@settings(max_examples=400)
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


@settings(max_examples=200)
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


@settings(max_examples=200)
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
