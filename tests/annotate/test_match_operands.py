"""The operands of a match that its rule has roles for: where they are read, and under which name."""

from __future__ import annotations

from quantc.annotate.match_operands import Slot, follows, keeps_values, moves, slots_of
from quantc.patterns.rule import Match
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL


def only_match(build: Build, op: str, *args: object) -> Match:
    """The match of a program that ends in an op."""
    (match,) = SMALL.table.match(build.done(build(op, *args)))
    return match


def test_each_operand_with_a_role_has_a_slot() -> None:
    build = Build()
    x, w, b = build.input("x", 2, 4), build.const("w", 3, 4), build.const("b", 3)
    match = only_match(build, "linear", x, w, b)
    # the rule binds the bias, and gives it no role
    assert list(slots_of(match)) == [Slot("x", match.root, 0, x, "act"), Slot("w", match.root, 1, w, "weight")]


def test_operands_from_inside_the_match_have_none() -> None:
    build = Build()
    conv = build("conv2d", build.input("x", 1, 2, 4, 4), build.const("w", 3, 2, 1, 1), None)
    match = only_match(build, "relu", conv)
    assert match.nodes == (conv, match.root)
    assert [(slot.name, slot.node) for slot in slots_of(match)] == [("x", conv), ("w", conv)]


def test_one_tensor_under_two_names_has_both_in_their_order() -> None:
    build = Build()
    x = build.input("x", 2, 4)
    match = only_match(build, "add", x, x)
    assert [(slot.name, slot.operand, slot.value) for slot in slots_of(match)] == [("x", 0, x), ("y", 1, x)]


def test_the_members_of_a_list_share_its_name() -> None:
    build = Build()
    x, y = build.input("x", 2, 4), build.input("y", 2, 4)
    match = only_match(build, "cat", [x, y, x], 1)
    assert [(slot.name, slot.operand, slot.value) for slot in slots_of(match)] == [
        ("xs", 0, x),
        ("xs", 1, y),
        ("xs", 2, x),
    ]


def test_rules_follow_or_ask_and_move_or_compute() -> None:
    build = Build()
    x = build.input("x", 2, 4)
    reshape, add = build("reshape", x, [8]), build("add", x, x)
    cat, sigmoid = build("cat", [x, x], 1), build("sigmoid", x)
    matches = {match.root: match for match in SMALL.table.match(build.done(reshape, add, cat, sigmoid))}
    told = {node: (follows(match), moves(match), keeps_values(match)) for node, match in matches.items()}
    assert told == {
        reshape: (True, True, True),
        add: (False, False, False),
        cat: (False, True, True),
        sigmoid: (False, False, False),
    }
