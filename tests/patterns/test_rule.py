"""Rules as values, what they refuse to be built of, and what a match and a refusal say."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest

from quantc.errors import PatternError, UnknownNameError
from quantc.patterns import Match, Rule, optional, predicate
from quantc.patterns import aten as v
from quantc.patterns.dsl import Items
from quantc.patterns.operand_patterns import value
from quantc.patterns.refusals import Condition, WrittenTo
from quantc.patterns.rule import claimed_cause
from tests.support.pattern_graphs import Build, attempt, conv_block, found, table_of


@predicate("root-is-used-once")
def why_not_once(match: Match) -> str | None:
    users = len(match.root.users)
    return None if users == 1 else f"{match.root.name} has {users} users"


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
    assert Rule("r", v.relu, when=why_not_once) == Rule("r", v.relu, when="root-is-used-once")
    assert Rule("r", v.relu, when=why_not_once).conditions == ("root-is-used-once",)


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule("Conv Clamp", v.conv), "not a name for a rule"),
        (lambda: Rule("r", v.conv, roles={"weight": "weight"}), "binds no such name"),
        (lambda: Rule("r", v.conv, supports=frozenset({"kernels"})), "did you mean kernel"),
        (lambda: Rule("r", v.conv, when="root-is-used-onc"), "did you mean root-is-used-once"),
        (lambda: Rule("r", v.conv, when=(3,)), "give a name or a function"),  # type: ignore[arg-type]
        (lambda: Rule("r", Items((value("x"),))), "a list for a pattern"),
        (lambda: Rule("lone", optional(v.relu)), "rule 'lone'"),
    ],
)
def test_malformed_rules_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PatternError) as caught:
        make()
    assert message in str(caught.value)


def test_the_result_has_a_role_without_being_named() -> None:
    assert Rule("r", v.relu, roles={"out": "act"}).roles == {"out": "act"}


def test_the_first_condition_against_a_match_is_its_reason() -> None:
    program, nodes = conv_block()
    match = found(v.relu, program, nodes["relu"])
    held = Rule("held", v.relu, when="root-is-used-once")
    assert held.why_not(match) is None
    both = Rule("both", v.relu, when=("root-is-used-once", lambda match: "no", lambda match: "never asked"))
    assert both.why_not(match) == Condition("", "no")
    other = found(v.add, program, nodes["add"])
    assert Rule("named", v.add, when="root-is-used-once").why_not(other) is None
    x = program.node("x")
    assert str(Rule("used", v.conv, when="root-is-used-once").why_not(replace(match, root=x))) == "x has 2 users"


def test_a_condition_may_give_a_cause_of_its_own() -> None:
    program, nodes = conv_block()
    cause = WrittenTo(nodes["conv"], "conv2d is written to")
    rule = Rule("r", v.relu, when=lambda match: cause)
    assert rule.why_not(found(v.relu, program, nodes["relu"])) is cause


def test_a_match_gives_its_bindings_and_names_the_near_ones() -> None:
    program, nodes = conv_block()
    match = found(v.conv >> v.sigmoid, program, nodes["sigmoid"])
    assert match["out"] is nodes["sigmoid"]
    assert match.node("w") is program.node("w")
    assert str(match) == "rule at sigmoid (conv2d, sigmoid)"
    with pytest.raises(UnknownNameError, match="binds no 'ww'") as caught:
        match["ww"]
    assert "did you mean w?" in str(caught.value)
    with pytest.raises(PatternError, match="'b' of rule 'rule' is None, not a node"):
        match.node("b")


def test_a_refusal_and_a_claim_name_rule_and_node() -> None:
    program, nodes = conv_block()
    assert str(attempt(v.tanh, program, nodes["relu"])) == "rule at relu: expected tanh, found relu"
    winner = found(v.conv >> v.sigmoid, program, nodes["sigmoid"])
    cause = claimed_cause(nodes["conv"], winner, "it fits, but ")
    assert str(cause) == "it fits, but conv2d is claimed by rule at sigmoid"
    assert cause.to_data() == {
        "kind": "claimed",
        "node": "conv2d",
        "rule": "rule",
        "root": "sigmoid",
        "text": str(cause),
    }


def test_larger_rules_are_tried_first_and_equal_ones_in_their_order() -> None:
    one, two = Rule("one", v.relu), Rule("two", v.tanh)
    reaching = Rule("reaching", v.relu >> optional(v.tanh))
    pair = Rule("pair", v.relu >> v.tanh)
    assert [rule.name for rule in table_of(one, two, reaching, pair).by_size] == ["pair", "reaching", "one", "two"]
