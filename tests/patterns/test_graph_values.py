"""What the matcher asks of values in a graph: arguments, types, and how they read in a reason."""

from __future__ import annotations

import operator

import pytest
import torch

from quantc.ir.dialect import BY_NAME, arguments
from quantc.ir.types import TensorType
from quantc.patterns import aten as v
from quantc.patterns.graph_values import argument_at, has_node, is_tensor_node, show, why_not_type
from quantc.patterns.operand_patterns import value
from quantc.patterns.refusals import UnknownType, WrongType
from tests.support.pattern_graphs import Build, refused


def test_a_size_is_not_a_tensor() -> None:
    b = Build()
    x = b.input("x")
    size = b("sym_size", x, 0)
    doubled = b.call(operator.mul, size, 2)
    scaled = b("mul", x, doubled)
    program = b.done(scaled)
    assert "expected a tensor for y, found mul" in refused(v.mul("x", "y"), program, scaled)


def test_an_argument_comes_by_position_by_keyword_or_by_default() -> None:
    b = Build()
    node = b("conv2d", b.input("x"), b.const("w", 4, 2, 3, 3), None, [2, 2], groups=2)
    rows = tuple((row.aten_name, row.default) for row in arguments(BY_NAME["conv2d"].target))
    names = [name for name, _ in rows]
    assert argument_at(node, names.index("stride"), rows) == [2, 2]
    assert argument_at(node, names.index("groups"), rows) == 2
    assert argument_at(node, names.index("bias"), rows) is None
    assert list(argument_at(node, names.index("dilation"), rows)) in ([1], [1, 1])


def test_sizes_are_no_tensors_whether_their_type_is_known_or_not() -> None:
    b = Build()
    untyped, typed = b.input("untyped"), b.input("typed", 4, 3)
    assert is_tensor_node(untyped)
    assert is_tensor_node(typed)
    for source in (untyped, typed):
        size = b("sym_size", source, 0)
        assert not is_tensor_node(size)
        assert not is_tensor_node(b.call(operator.add, size, 1))
    assert not is_tensor_node(3)
    assert not is_tensor_node(None)


@pytest.mark.parametrize("plain", [None, 3, 0.5, "mean", [1, 2], (), torch.float16])
def test_plain_arguments_are_not_computed(plain: object) -> None:
    assert not has_node(plain)


def test_an_argument_with_one_node_in_its_list_is_computed() -> None:
    b = Build()
    size = b("sym_size", b.input("x"), 0)
    assert has_node(size)
    assert has_node([2, size])
    assert has_node((size, 2))


def test_types_are_held_against_dtypes_then_ranks() -> None:
    b = Build()
    x, untyped = b.input("x", 2, 3), b.input("untyped")
    assert why_not_type(x, value("v", dtype=("i8", "f32"), rank=(1, 2))) is None
    wrong = why_not_type(x, value("v", dtype=("i8", "u8"), rank=4))
    assert isinstance(wrong, WrongType)
    assert (wrong.found, wrong.dtypes, wrong.ranks) == (TensorType(torch.float32, (2, 3)), ("i8", "u8"), (4,))
    assert str(wrong) == "x (placeholder) is f32[2,3], wanted i8 or u8"
    assert str(why_not_type(x, value("v", rank=(3, 4)))) == "x (placeholder) is f32[2,3], wanted rank 3 or 4"
    assert isinstance(why_not_type(untyped, value("v", rank=2)), UnknownType)


def test_values_read_as_they_are_known() -> None:
    b = Build()
    x = b.input("x")
    relu, other = b("relu", x), b("relu", x, name="gate")
    assert show(None) == "nothing"
    assert [show(node) for node in (relu, other, x)] == ["relu", "gate (relu)", "x (placeholder)"]
    assert show([relu, None, 2]) == "[relu, nothing, 2]"
    assert show([1, 2, 3, 4]) == "[1, 2, 3, 4]"
    assert show((1, 2, 3, 4, 5)) == "[1, 2, 3, 4, … 5 in all]"
    assert show("same") == "'same'"
