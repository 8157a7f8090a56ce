"""Plain values in patterns, and checks of op attributes: what is the same, and what a check accepts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quantc.errors import PatternError
from quantc.patterns.checks import Check, at_least, at_most, differs, equals, key_of, one_of, plain, same


def test_lists_become_tuples_at_every_depth() -> None:
    assert plain([1, [2.5, ["a"]], (None, True)]) == (1, (2.5, ("a",)), (None, True))


@pytest.mark.parametrize(
    ("value", "message"), [(math.nan, "NaN"), ([1, math.nan], "NaN"), ({1}, "set"), (torch.ones(1), "Tensor")]
)
def test_what_cannot_be_compared_is_refused(value: object, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        plain(value)


def test_keys_tell_a_bool_from_a_number_but_not_int_from_float() -> None:
    assert key_of(True) != key_of(1)
    assert key_of(0) != key_of(False)
    assert key_of(1) == key_of(1.0)
    assert hash(key_of(1)) == hash(key_of(1.0))
    assert key_of((1, True)) != key_of((True, 1))
    assert key_of("1") != key_of(1)
    assert key_of(()) != key_of(None)


@pytest.mark.parametrize(
    ("expected", "actual", "is_same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (True, True, True),
        (False, 0, False),
        (None, None, True),
        (None, 0, False),
        (1, [1, 1], True),  # a number stands for every item
        (1, [1, 2], False),
        (1, [], False),
        ((1, 2), [1, 2], True),
        ((1, 2), [1, 2, 3], False),
        ((1,), 1, False),
        ((), [], True),
        ("mean", "mean", True),
        (torch.int8, torch.int8, True),
        (torch.int8, torch.uint8, False),
    ],
)
def test_what_is_the_same(expected: Any, actual: Any, is_same: bool) -> None:
    assert same(expected, actual) is is_same


@pytest.mark.parametrize(
    ("check", "accepted", "refused"),
    [
        (equals(2), (2, 2.0, [2, 2]), (1, True, None, [2, 1])),
        (differs(2), (1, None, [2, 1]), (2, [2, 2])),
        (one_of(None, 0), (None, 0, 0.0, [0, 0]), (1, False, "0")),
        (one_of((2, 3), (3, 2)), ([2, 3], (3, 2)), ([2, 2], [2], 2)),
        (at_least(2), (2, 2.5, [2, 3]), (1, [2, 1], [], None, True, "3")),
        (at_most(2), (2, -1, [0, 2]), (3, [0, 3], [], None, False)),
    ],
    ids=str,
)
def test_what_a_check_accepts(check: Check, accepted: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    assert [check.accepts(value) for value in accepted] == [True] * len(accepted)
    assert [check.accepts(value) for value in refused] == [False] * len(refused)


def test_checks_are_values_and_print_as_comparisons() -> None:
    assert equals([1, 1]) == equals((1, 1))
    assert len({equals(1), equals(1.0), equals(True)}) == 2
    assert equals(1) != differs(1)
    assert [str(check) for check in (equals(1), differs(None), one_of(1, "a"), at_least(0), at_most(6.0))] == [
        "== 1",
        "!= None",
        "in (1, 'a')",
        ">= 0",
        "<= 6.0",
    ]


@pytest.mark.parametrize("bound", ["2", None, True, (1, 2)])
def test_a_bound_is_a_number(bound: Any) -> None:
    for make in (at_least, at_most):
        with pytest.raises(PatternError, match="needs a number"):
            make(bound)


def test_one_of_nothing_is_refused() -> None:
    with pytest.raises(PatternError, match="at least one value"):
        one_of()
