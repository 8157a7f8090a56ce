"""Conditions with a name. A rule table in JSON refers to them by it.

@predicate("is-square")
def why_not_square(match: Match) -> str | None:
    return None if ... else "the kernel is 3x5, not square"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

from quantc.errors import PatternError, suggest
from quantc.patterns.refusals import Cause

AnyPredicate: TypeAlias = Callable[[Any], str | Cause | None]
"""A `quantc.patterns.Predicate`, whatever a match is."""
P = TypeVar("P", bound=AnyPredicate)
_BY_NAME: dict[str, AnyPredicate] = {}


def predicate(name: str) -> Callable[[P], P]:
    """Register a condition under a kebab-case name, which is unique."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise PatternError(f"{name!r} is not a name for a predicate", advice="use lower case and dashes: is-square")

    def register(function: P) -> P:
        known = _BY_NAME.get(name)
        if known is not None and _place(known) != _place(function):
            raise PatternError(
                f"the predicate {name!r} exists already", where=_place(known), advice="choose another name"
            )
        _BY_NAME[name] = function
        return function

    return register


def _place(function: AnyPredicate) -> str:
    """The place of definition of a function: a reloaded module may register its predicates again."""
    module = getattr(function, "__module__", "")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


def find(name: str) -> AnyPredicate:
    """The predicate of that name."""
    if name not in _BY_NAME:
        raise PatternError(
            f"unknown predicate {name!r}",
            advice=f"{suggest(name, _BY_NAME, noun='predicates')}; import the module that registers it first",
        )
    return _BY_NAME[name]


def name_of(function: AnyPredicate) -> str | None:
    """The name a function was registered under, if it was."""
    return next((name for name, known in _BY_NAME.items() if known is function), None)
