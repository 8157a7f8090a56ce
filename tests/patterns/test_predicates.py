"""Conditions with a name: registered once, found by it."""

from __future__ import annotations

import pytest

from quantc.errors import PatternError
from quantc.patterns import Match, predicate
from quantc.patterns.predicates import find, name_of


@predicate("has-a-short-name")
def why_not_short(match: Match) -> str | None:
    return None if len(match.root.name) < 5 else "the name is long"


def test_a_predicate_is_found_by_its_name_and_the_name_by_the_predicate() -> None:
    assert find("has-a-short-name") is why_not_short
    assert name_of(why_not_short) == "has-a-short-name"
    assert name_of(lambda match: None) is None


def test_a_name_is_taken_once() -> None:
    def other(match: Match) -> str | None:
        return None

    with pytest.raises(PatternError, match="'has-a-short-name' exists already") as caught:
        predicate("has-a-short-name")(other)
    assert str(caught.value.where).endswith("test_predicates.why_not_short")
    assert find("has-a-short-name") is why_not_short


def test_a_reloaded_module_may_register_its_own_again() -> None:
    def reloaded(match: Match) -> str | None:
        return None

    reloaded.__module__, reloaded.__qualname__ = why_not_short.__module__, why_not_short.__qualname__
    try:
        assert predicate("has-a-short-name")(reloaded) is reloaded
        assert find("has-a-short-name") is reloaded
    finally:
        predicate("has-a-short-name")(why_not_short)


@pytest.mark.parametrize("name", ["Not A Name", "", "-a", "a--b", "a_b", "a-"])
def test_a_name_is_words_and_dashes(name: str) -> None:
    with pytest.raises(PatternError, match="not a name for a predicate"):
        predicate(name)


def test_an_unknown_name_is_refused_with_the_near_one() -> None:
    with pytest.raises(PatternError) as caught:
        find("has-a-shrot-name")
    assert "'has-a-shrot-name'" in caught.value.what
    assert "did you mean has-a-short-name" in str(caught.value.advice)
    assert "import the module" in str(caught.value.advice)
