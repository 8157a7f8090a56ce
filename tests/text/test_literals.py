"""Literals: one spelling for every kind of value, which reads back as the same value."""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from quantc.ir.program import Program
from quantc.text.literals import Opaque, format_value, no_nodes, quote, used_nodes
from quantc.text.parser import parse
from quantc.text.printer import dump
from tests.support.programs import aten, signature_of

LITERALS: list[tuple[Any, str | None]] = [
    (0, "0"),
    (-12345678901234567890, "-12345678901234567890"),
    (1.0, "1.0"),
    (-0.0, "-0.0"),
    (1e-300, "1e-300"),
    (math.inf, "inf"),
    (-math.inf, "-inf"),
    (math.nan, "nan"),
    (True, "True"),
    (None, "None"),
    (complex(-0.0, math.inf), "complex(-0.0, inf)"),
    ("", '""'),
    ('quote " back \\ line \n end \u2028 é \ud800 # {[(', None),
    (torch.float32, "f32"),
    (torch.bool, "b1"),
    (torch.float8_e4m3fn, "f8e4m3"),
    (torch.qint8, "torch.qint8"),
    (torch.device("cpu"), 'device("cpu")'),
    (torch.device("cuda", 1), 'device("cuda:1")'),
    (torch.strided, "torch.strided"),
    (torch.sparse_coo, "torch.sparse_coo"),
    (torch.channels_last, "torch.channels_last"),
    (torch.preserve_format, "torch.preserve_format"),
    ([], "[]"),
    ([1, [2.0, "x"]], '[1, [2.0, "x"]]'),
    ((), "()"),
    ((1,), "(1,)"),
    ((1, (2,)), "(1, (2,))"),
    (slice(None, 3, None), "slice(None, 3, None)"),
    (range(0, 6, 2), "range(0, 6, 2)"),
    ({}, "{}"),
    ({"a": 1, 2: [None]}, '{"a": 1, 2: [None]}'),
    (..., "..."),
    (aten.cumsum.default, "&aten.cumsum.default"),
    (torch.ops.higher_order.cond, "&higher_order.cond"),
    (Opaque("a kind"), 'opaque("a kind")'),
]


def carrying(value: Any) -> Program:
    """A program with a call that has `value` among its arguments."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.relu, (x, value), {"key": value}),))
    return Program(graph, nn.Module(), signature_of(graph, 1))


def plain(value: Any) -> Any:
    """fx's immutable containers as plain ones."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(plain(item) for item in value)
    return value


@pytest.mark.parametrize(("value", "text"), LITERALS, ids=[str(index) for index in range(len(LITERALS))])
def test_literal(value: Any, text: str | None) -> None:
    program = carrying(value)
    if text is not None:
        assert f"torch:relu(%x, {text}, key={text})" in dump(program)
    (call,) = parse(dump(program)).graph.find_nodes(op="call_function", target=torch.relu)
    for read in (plain(call.args[1]), plain(call.kwargs["key"])):
        assert type(read) is type(value)
        assert read == value or (isinstance(value, float) and math.isnan(value) and math.isnan(read))
        assert repr(read) == repr(value)
    assert dump(parse(dump(program))) == dump(program)


def test_nodes_inside_literals() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call = graph.call_function(torch.relu, ([x, (y, {"k": [x]})], slice(x, None, y)), {"z": y})
    graph.output((call,))
    copy = parse(dump(Program(graph, nn.Module(), signature_of(graph, 1))))
    assert str(copy.node(call.name).args) == str(call.args)
    assert copy.node(call.name).all_input_nodes == [copy.node("x"), copy.node("y")]


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec=None), max_size=8)
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float16, torch.int32, torch.strided, torch.channels_last, torch.device("meta"), ...]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_any_literal_comes_back(value: Any) -> None:
    program = carrying(value)
    copy = parse(dump(program))
    (call,) = copy.graph.find_nodes(op="call_function", target=torch.relu)
    assert repr(plain(call.args[1])) == repr(value)
    assert dump(copy) == dump(program)


class Level(IntEnum):
    HIGH = 3


def test_numbers_of_other_kinds_are_written_as_plain_ones() -> None:
    values: list[Any] = [np.float64(0.1), Level.HIGH, np.complex128(1 + 2j), np.str_("x")]
    assert [format_value(value, no_nodes) for value in values] == ["0.1", "3", "complex(1.0, 2.0)", '"x"']


def test_what_text_cannot_carry_is_described_without_an_address() -> None:
    assert format_value(object(), no_nodes) == 'opaque("builtins.object")'
    assert format_value(torch.ones(2, 3), no_nodes) == 'opaque("torch.Tensor f32[2,3]")'
    assert format_value(np.float32(0.5), no_nodes) == 'opaque("numpy.float32")'


def test_strings_are_ascii_on_one_line() -> None:
    written = quote('a\nb "c" \\ é \u2028')
    assert written == '"a\\nb \\"c\\" \\\\ \\u00e9 \\u2028"'


def test_nodes_are_written_as_the_caller_says() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert format_value([x, (y,)], no_nodes) == "[%x, (%y,)]"
    assert format_value({"a": x}, lambda node: node.name.upper()) == '{"a": X}'


def test_used_nodes_come_in_order_with_repetitions() -> None:
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    value = ([a, (b, {"k": a})], slice(c, None, b), 3, {"z": [c]})
    assert list(used_nodes(value)) == [a, b, a, c, b, c]
    deep: Any = a
    for _ in range(5000):
        deep = [deep]
    assert list(used_nodes(deep)) == [a]
