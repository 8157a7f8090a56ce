"""Plain values in patterns, and checks of op attributes.

A check is data: it compares, hashes, prints and serializes to JSON. A number checked against a list of numbers applies
to every item, so `equals(1)` accepts the stride `[1, 1]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import torch

from quantc.errors import PatternError

Scalar: TypeAlias = "bool | int | float | str | torch.dtype | None"
Plain: TypeAlias = "Scalar | tuple[Plain, ...]"
Key: TypeAlias = "tuple[str, Any]"


def plain(value: Any) -> Plain:
    """`value` normalized for use in a pattern: lists become tuples, NaN and objects are refused."""
    if isinstance(value, tuple | list):
        return tuple(plain(item) for item in value)
    if isinstance(value, float) and math.isnan(value):
        raise PatternError("NaN equals nothing, so it cannot be part of a pattern", advice="use a predicate instead")
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise PatternError(
        f"{value!r} is a {type(value).__name__}, which cannot be compared in a pattern",
        advice="use None, a bool, a number, a string, a dtype, or a list of these",
    )


def key_of(value: Plain) -> Key:
    """A hash key of a value. Unlike `==` in Python, it distinguishes `True` from `1`."""
    if isinstance(value, tuple):
        return ("list", tuple(key_of(item) for item in value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ("number", value)
    return (type(value).__name__, value)


def same(expected: Plain, actual: Any) -> bool:
    """True if an argument found in a graph equals the value in a pattern."""
    if isinstance(actual, tuple | list):
        return _same_list(expected, actual)
    if isinstance(expected, tuple):
        return False
    if _is_number(expected) and _is_number(actual):
        return bool(expected == actual)
    return type(expected) is type(actual) and bool(expected == actual)


def _same_list(expected: Plain, actual: tuple[Any, ...] | list[Any]) -> bool:
    if isinstance(expected, tuple):
        return len(expected) == len(actual) and all(map(same, expected, actual))
    return len(actual) > 0 and all(same(expected, item) for item in actual)


def _is_number(value: Any) -> bool:
    return type(value) is int or type(value) is float


class Comparison(Enum):
    """The comparison of an attribute check."""

    EQUALS = "equals"
    DIFFERS = "differs"
    ONE_OF = "one_of"
    AT_LEAST = "at_least"
    AT_MOST = "at_most"


SIGNS = {
    Comparison.EQUALS: "==",
    Comparison.DIFFERS: "!=",
    Comparison.ONE_OF: "in",
    Comparison.AT_LEAST: ">=",
    Comparison.AT_MOST: "<=",
}


@dataclass(frozen=True)
class Check:
    """A constraint on an attribute. Built by `equals`, `differs`, `one_of`, `at_least`, `at_most`."""

    comparison: Comparison
    value: Plain = field(compare=False)
    key: Key = field(init=False, repr=False)

    def __post_init__(self) -> None:
        value = plain(self.value)
        if self.comparison in (Comparison.AT_LEAST, Comparison.AT_MOST) and not _is_number(value):
            raise PatternError(f"{self.comparison.value} needs a number, got {value!r}")
        if self.comparison is Comparison.ONE_OF and not (isinstance(value, tuple) and value):
            raise PatternError("one_of needs at least one value", advice="list the values: one_of(1, 2)")
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "key", key_of(value))

    def accepts(self, actual: Any) -> bool:
        match self.comparison, self.value:
            case Comparison.EQUALS, value:
                return same(value, actual)
            case Comparison.DIFFERS, value:
                return not same(value, actual)
            case Comparison.ONE_OF, tuple(values):
                return any(same(value, actual) for value in values)
            case Comparison.AT_LEAST, (int() | float()) as least:
                return _all_numbers(actual) and all(item >= least for item in _items(actual))
            case Comparison.AT_MOST, (int() | float()) as most:
                return _all_numbers(actual) and all(item <= most for item in _items(actual))
            case _:
                return False

    def __str__(self) -> str:
        value = self.value
        shown = ", ".join(map(repr, value)) if isinstance(value, tuple) else repr(value)
        return f"{SIGNS[self.comparison]} {f'({shown})' if isinstance(value, tuple) else shown}"


def _items(actual: Any) -> tuple[Any, ...]:
    return tuple(actual) if isinstance(actual, tuple | list) else (actual,)


def _all_numbers(actual: Any) -> bool:
    items = _items(actual)
    return len(items) > 0 and all(map(_is_number, items))


def equals(value: Any) -> Check:
    """The attribute is `value`."""
    return Check(Comparison.EQUALS, value)


def differs(value: Any) -> Check:
    """The attribute is anything but `value`."""
    return Check(Comparison.DIFFERS, value)


def one_of(*values: Any) -> Check:
    """The attribute is one of `values`."""
    return Check(Comparison.ONE_OF, values)


def at_least(number: float) -> Check:
    """The attribute, or every item of it, is a number not below `number`."""
    return Check(Comparison.AT_LEAST, number)


def at_most(number: float) -> Check:
    """The attribute, or every item of it, is a number not above `number`."""
    return Check(Comparison.AT_MOST, number)
