"""Operand patterns: how leaves are written, what they may ask for, and that they are values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quantc.errors import PatternError
from quantc.patterns.operand_patterns import ANYTHING, Leaf, LeafKind, LiteralValue, const, leaf, number, value


@pytest.mark.parametrize(
    ("token", "kind", "name", "may_be_absent"),
    [
        ("x", LeafKind.VALUE, "x", False),
        ("b?", LeafKind.VALUE, "b", True),
        ("xs*", LeafKind.LIST, "xs", False),
        ("xs*?", LeafKind.LIST, "xs", True),
    ],
)
def test_a_token_reads_and_prints_the_same(token: str, kind: LeafKind, name: str, may_be_absent: bool) -> None:
    found = leaf(token)
    assert (found.kind, found.name, found.may_be_absent) == (kind, name, may_be_absent)
    assert found.token == str(found) == token


def test_the_blank_accepts_anything_and_is_one_value_however_written() -> None:
    assert leaf("_") == leaf("_?") == ANYTHING
    assert ANYTHING.is_anything
    assert not value("_", rank=4).is_anything
    assert not const("_").is_anything


def test_only_plain_values_are_open_to_a_chain() -> None:
    assert [found.is_open for found in (value("x", rank=4), const("w"), number("n"), leaf("xs*"))] == [
        True,
        False,
        False,
        False,
    ]


def test_leaves_print_what_they_ask_for() -> None:
    assert str(const("b?")) == "const(b?)"
    assert str(number("n")) == "number(n)"
    assert str(value("x", dtype=("f32", torch.int8), rank=(2, 3))) == "value(x, dtype=f32|i8, rank=2|3)"


def test_dtypes_and_ranks_are_given_alone_or_as_several() -> None:
    assert value("x", dtype=torch.float16, rank=4) == value("x", dtype=["f16"], rank=[4])
    assert hash(value("x", rank=4)) == hash(value("x", rank=(4,)))
    assert value("x", rank=4) != const("x", rank=4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: leaf("2x"), "cannot name an operand"),
        (lambda: leaf(""), "cannot name an operand"),
        (lambda: value("out"), "cannot name an operand"),
        (lambda: value("x", dtype="float32"), "'float32'"),
        (lambda: value("x", dtype="f23"), "did you mean"),
        (lambda: value("x", rank=-1), "not ranks"),
        (lambda: value("x", rank=True), "not ranks"),
        (lambda: const("ws*"), "both a list and a const"),
        (lambda: number("ns*"), "both a list and a number"),
        (lambda: Leaf(LeafKind.NUMBER, "n", dtypes=("f32",)), "neither dtype nor rank"),
        (lambda: Leaf(LeafKind.LIST, "xs", ranks=(2,)), "neither dtype nor rank"),
    ],
)
def test_what_a_leaf_cannot_ask_for_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(PatternError) as caught:
        make()
    assert message in str(caught.value)


def test_literals_are_compared_as_patterns_compare() -> None:
    assert LiteralValue([1, 2]) == LiteralValue((1, 2))
    assert LiteralValue(1) == LiteralValue(1.0)
    assert LiteralValue(1) != LiteralValue(True)
    assert len({LiteralValue(0), LiteralValue(False), LiteralValue(None)}) == 3
    assert str(LiteralValue([1, "a"])) == "(1, 'a')"
    with pytest.raises(PatternError, match="NaN"):
        LiteralValue(float("nan"))
