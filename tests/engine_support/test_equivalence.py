"""Chains of references and classes of ties, over any keys."""

from __future__ import annotations

import random

import pytest

from quantc.errors import AnnotationError
from quantc.support.equivalence import equivalence_classes, follow


def like(outcome: str) -> str | None:
    """`=b` refers to b."""
    return outcome[1:] if outcome.startswith("=") else None


def test_references_are_followed_to_their_end() -> None:
    outcomes = {"a": "=b", "b": "=c", "c": "int8", "d": "float", "e": "=a"}
    assert follow(outcomes, like) == {
        "a": ("c", "int8"),
        "b": ("c", "int8"),
        "c": ("c", "int8"),
        "d": ("d", "float"),
        "e": ("c", "int8"),
    }


def test_a_reference_to_what_has_no_outcome_ends_there() -> None:
    assert follow({"a": "=x"}, like) == {"a": ("x", None), "x": ("x", None)}


def test_a_circle_is_refused_with_its_members_and_not_the_way_to_it() -> None:
    with pytest.raises(AnnotationError, match="<b> -> <c> -> <b>") as caught:
        follow({"a": "=b", "b": "=c", "c": "=b"}, like, show=lambda place: f"<{place}>")
    assert caught.value.where == "<b>, <c>"
    with pytest.raises(AnnotationError, match="a -> a"):
        follow({"a": "=a"}, like)


def test_long_chains_are_no_recursion() -> None:
    outcomes = {index: index + 1 for index in range(20_000)}
    ends = follow(outcomes, lambda value: None if value == 20_000 else value)
    assert ends[0] == (19_999, 20_000)


def test_classes_do_not_depend_on_the_order_of_ties() -> None:
    ties = [("a", "b"), ("c", "d"), ("b", "e"), ("e", "a")]
    expected = {frozenset("abe"), frozenset("cd"), frozenset("f")}
    for seed in range(5):
        random.Random(seed).shuffle(ties)
        assert {frozenset(group) for group in equivalence_classes("abcdef", ties)} == expected
