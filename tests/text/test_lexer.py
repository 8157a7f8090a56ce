"""One line of dump text: its tokens, and the literals made of them; nothing is evaluated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quantc.errors import ParseError
from quantc.ir.types import ScalarType, TensorType, TupleType
from quantc.text.lexer import DEPTH, Reader
from quantc.text.literals import Opaque

aten = torch.ops.aten


def reader(line: str, **options: Any) -> Reader:
    return Reader(line, line, 1, **options)


def value(line: str) -> Any:
    made = reader(line)
    found = made.value()
    made.end()
    return found


def fault(line: str) -> tuple[str, int]:
    """What is wrong with a value, and the column."""
    with pytest.raises(ParseError) as caught:
        value(line)
    return caught.value.what, caught.value.column


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_have_kinds_and_places() -> None:
    line = '%x = conv2d(@g/a, "s # t", -1.5e-3, .view) #0123abcd # the rest'
    tokens = []
    made = reader(line)
    while made.peek().kind != "end":
        tokens.append(made.take())
    assert [token.kind for token in tokens if token.kind != "punctuation"] == [
        *("node", "word", "reference", "string", "number", "method", "digest", "comment"),
    ]
    assert all(line[token.start :].startswith(token.text) for token in tokens)
    assert tokens[-1].text == "# the rest"


def test_a_digest_is_eight_hex_digits_and_anything_else_a_comment() -> None:
    assert [reader(text).peek().kind for text in ("#0123abcd", "#0123abc", "#0123abcde", "#0123abcg")] == [
        "digest",
        "comment",
        "comment",
        "comment",
    ]


def test_looking_ahead_takes_nothing() -> None:
    made = reader("  a b")
    assert made.peek() == made.peek() == made.take()
    assert not made.accept("c")
    assert made.accept("b")
    made.end()


def test_what_is_expected_is_told_with_what_is_there() -> None:
    for line, told in (("x y", "there is 'y'"), ("x", "the line ends")):
        made = reader(line)
        made.take()
        with pytest.raises(ParseError, match=f"expected '=', but {told}") as caught:
            made.require("=")
        assert caught.value.column == made.position + 1 + line.count(" ")
    with pytest.raises(ParseError, match="does not belong"):
        reader("?").peek()


def test_references_and_strings_may_hold_anything() -> None:
    assert reader("@a/b.c-d").reference() == "a/b.c-d"
    assert reader('@"any \\"name\\""').reference() == 'any "name"'
    assert reader('"\\u00e9 # (" rest').string() == "é # ("
    with pytest.raises(ParseError, match="double quotes"):
        reader("word").string()


# -- literals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("12", 12),
        ("-1.5e-3", -0.0015),
        ("1.", 1.0),
        ("-inf", -math.inf),
        ("True", True),
        ("None", None),
        ("...", ...),
        ("[1, [2], ]", [1, [2]]),
        ("(1,)", (1,)),
        ("()", ()),
        ('{"a": 1, 2: [None]}', {"a": 1, 2: [None]}),
        ("slice(None, 3, 2)", slice(None, 3, 2)),
        ("range(0, 6, 2)", range(0, 6, 2)),
        ("complex(1.0, -0.0)", complex(1.0, -0.0)),
        ("bf16", torch.bfloat16),
        ("torch.channels_last", torch.channels_last),
        ('device("cpu")', torch.device("cpu")),
        ("&relu", aten.relu.default),
        ("&aten.cumsum.default", aten.cumsum.default),
        ('opaque("a kind")', Opaque("a kind")),
    ],
)
def test_literals_are_the_values_they_spell(line: str, expected: Any) -> None:
    found = value(line)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("line", "told", "column"),
    [
        ("hello", "'hello' is not a value", 1),
        ("(1)", "tuple of one", 1),
        ("[1, 2", "expected", 6),
        ("{[1]: 2}", "key of a dictionary", 1),
        ("[1, %x]", "%x may not stand here", 5),
        ("[@g]", "@g may not stand here", 2),
        ("complex(1, 2)", "not a complex", 1),
        ('device("nothing")', "not a device", 1),
        ("device(3)", "not a device", 1),
        ("range()", "not a range", 1),
        ("slice(1)", "not a slice", 1),
        ("&rellu", "rellu", 2),
        ("&os:system", "os:system", 2),
        ('"\\q"', "not a string", 1),
        ("9" * 4001, "too many digits", 1),
        ("[" * (DEPTH + 3), "too deeply", DEPTH + 2),
        ("=", "a value", 1),
    ],
)
def test_what_is_no_literal_is_refused_at_its_column(line: str, told: str, column: int) -> None:
    what, at = fault(line)
    assert told in what
    assert at == column


def test_functions_that_are_given_can_be_named() -> None:
    assert reader("&my:function", functions={"my:function": len}).value() is len


# -- types -------------------------------------------------------------------------------------------------------------


def test_types_end_at_a_space_outside_brackets() -> None:
    made = reader("(f32[2*s0 + 1, 3], int(s0), ?) = next")
    assert made.type() == TupleType((TensorType(torch.float32, ("2*s0 + 1", 3)), ScalarType("int", "s0"), None))
    assert made.accept("=")


@pytest.mark.parametrize("text", ["f33[2]", "f32[2,,3]", "f32", "(" * (DEPTH + 1), "(f32[,2])"])
def test_what_is_no_type_is_refused_where_it_begins(text: str) -> None:
    made = reader(f"  {text} = x")
    with pytest.raises(ParseError, match="type") as caught:
        made.type()
    assert caught.value.column == 3
