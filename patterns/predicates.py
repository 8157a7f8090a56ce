"""Conditions with a name. A rule table in JSON refers to them by it.

@predicate("is-square")
def why_not_square(match: Match) -> str | None:
    return None if ... else "the kernel is 3x5, not square"
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from quantc.errors import PatternError, suggest

if TYPE_CHECKING:
    from quantc.patterns.match import Match
    from quantc.patterns.refusals import Cause


class Predicate(Protocol):
    """Says why a match is not wanted, in words or as a cause that `explain` can act on; None if it is."""

    def __call__(self, match: Match, /) -> str | Cause | None: ...


P = TypeVar("P", bound=Predicate)
_BY_NAME: dict[str, Predicate] = {}


def predicate(name: str) -> Callable[[P], P]:
    """Register a condition under a kebab-case name. A name is given once and for all."""
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


def _place(function: Predicate) -> str:
    """Where a function is defined: a module that is loaded again may register its predicates again."""
    module = getattr(function, "__module__", "")
    return f"{module}.{getattr(function, '__qualname__', repr(function))}"


def find(name: str) -> Predicate:
    """The predicate of that name."""
    if name not in _BY_NAME:
        raise PatternError(
            f"there is no predicate {name!r}",
            advice=f"{suggest(name, _BY_NAME, noun='predicates')}; import the module that registers it first",
        )
    return _BY_NAME[name]


def name_of(function: Predicate) -> str | None:
    """The name a function was registered under, if it was."""
    return next((name for name, known in _BY_NAME.items() if known is function), None)
