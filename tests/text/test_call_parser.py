"""Calls in dump text: arguments bound to the schema, attributes, modes and origins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantc.errors import ParseError
from quantc.ir.sites import ModeValue, Origin
from quantc.text.call_parser import (
    by_schema,
    check_getattr,
    is_method,
    read_arguments,
    read_attributes,
    read_mode,
    read_origin,
)
from quantc.text.lexer import Reader, Token

aten = torch.ops.aten


def reader(line: str) -> Reader:
    return Reader(line, line, 1)


def bound(target: Any, line: str, at_least: int = -1) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call as fx takes them."""
    made = reader(line)
    args, kwargs = read_arguments(made)
    return by_schema(made, Token("word", "op", 0), target, args, kwargs, at_least)


def test_arguments_come_by_position_then_by_name() -> None:
    assert read_arguments(reader('(1, "x", [2], key=3, other=None)')) == ((1, "x", [2]), {"key": 3, "other": None})
    assert read_arguments(reader("()")) == ((), {})
    assert read_arguments(reader("(True, )")) == ((True,), {})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("(a=1, 2)", "come before"),
        ("(a=1, a=2)", "'a' is given twice"),
        ("(class=1)", "'class'"),
        ("(1 2)", "expected"),
        ("1)", "expected"),
    ],
)
def test_arguments_that_are_out_of_order_are_refused(line: str, told: str) -> None:
    with pytest.raises(ParseError, match=told):
        read_arguments(reader(line))


def test_names_of_the_dialect_and_of_aten_are_positions() -> None:
    assert bound(aten.linear.default, "(1, w=2, b=3)") == ((1, 2, 3), {})
    assert bound(aten.linear.default, "(1, weight=2)") == ((1, 2), {})
    assert bound(aten.add.Tensor, "(1, y=2, alpha=3)") == ((1, 2), {"alpha": 3})


def test_defaults_fill_the_gap_before_a_later_argument() -> None:
    args, kwargs = bound(aten.conv2d.default, "(1, 2, padding=[1, 1])")
    assert (args, kwargs) == ((1, 2, None, [1, 1], [1, 1]), {})
    assert args[3] is not bound(aten.conv2d.default, "(1, 2, padding=[1, 1])")[0][3], "lists are not shared"


def test_a_mode_needs_its_argument_to_be_there() -> None:
    assert bound(aten.flatten.using_ints, "(1)") == ((1,), {})
    assert bound(aten.flatten.using_ints, "(1)", at_least=2) == ((1, 0, -1), {})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("(1, 2, 3, 4)", "takes 3 arguments, not 4"),
        ("(1)", "needs the argument 'w'"),
        ("(1, 2, x=3)", "'x' is given twice"),
        ("(1, 2, weights=3)", "'weights'"),
    ],
)
def test_arguments_that_the_schema_does_not_have_are_refused(line: str, told: str) -> None:
    with pytest.raises(ParseError, match=told):
        bound(aten.linear.default, line)


def test_attributes_are_those_allowed_each_once() -> None:
    assert read_attributes(reader('{counter="n", mode_arg=2}'), "counter", "mode_arg") == {
        "counter": "n",
        "mode_arg": 2,
    }
    assert read_attributes(reader("rest"), "counter") == {}
    for line in ("{speed=3}", "{counter=1, counter=2}"):
        with pytest.raises(ParseError, match=r"speed|counter"):
            read_attributes(reader(line), "counter")


def test_modes_are_a_position_and_two_values() -> None:
    assert read_mode(reader(""), {"mode_arg": 2, "train": True, "eval": False}) == ModeValue(2, True, False)
    assert read_mode(reader(""), {"mode_arg": 0, "train": 0.5, "eval": 0}) == ModeValue(0, 0.5, 0)
    assert read_mode(reader(""), {"train": True}) is None
    for rows in ({"mode_arg": -1}, {"mode_arg": True}, {"mode_arg": 1, "train": True}, {"mode_arg": 1, "train": "x"}):
        with pytest.raises(ParseError, match=r"mode_arg=|train="):
            read_mode(reader(""), rows)


@pytest.mark.parametrize(
    "origin",
    [
        Origin("layer1.0", "Conv2d", "model.py", 12),
        Origin("layer1"),
        Origin(module_type="Net"),
        Origin(file="model.py", line=3),
        Origin("a", "", "model.py", 3),
    ],
    ids=str,
)
def test_origins_read_back(origin: Origin) -> None:
    assert read_origin(str(origin)) == origin


@pytest.mark.parametrize(
    "text", ["a b : c @ d", "x @ some file.py:3", "a : b : c", "a : my.Conv", "a @ folder/model.py:3", "@ model.py:07"]
)
def test_other_text_prints_the_same_again(text: str) -> None:
    assert read_origin(text) == Origin(module_path=text)


def test_methods_are_those_of_tensors_and_containers() -> None:
    assert [is_method(name) for name in ("view", "append", "items", "tofile", "__class__", "_make_subclass")] == [
        *(True, True, True, False, False, False),
    ]


def test_only_public_attributes_of_tensors_are_read() -> None:
    line, callee = reader(""), Token("word", "builtins:getattr", 0)
    check_getattr(line, callee, (1, "shape"))
    for args in ((1, "__class__"), (1, "_grad"), (1, "nothing"), (1,), (1, 3)):
        with pytest.raises(ParseError, match="getattr"):
            check_getattr(line, callee, args)
