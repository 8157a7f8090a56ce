"""Types of values: what they print, what reads them back, and what has none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from quantc.ir.types import (
    DTYPES,
    ScalarType,
    TensorType,
    TupleType,
    ValueType,
    dtype_of,
    is_empty,
    parse_type,
    rank_of,
    same_types,
    split_top_level,
    tensor_type,
    type_of_value,
)

TENSORS = st.builds(
    TensorType,
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.integers(0, 99) | st.sampled_from(["s0", "2*s0 + 1", "Max(1, s0)"]), max_size=4).map(tuple),
)
TYPES: st.SearchStrategy[ValueType] = st.recursive(
    TENSORS | st.sampled_from([ScalarType("int", "s0"), ScalarType("float", "1.5"), ScalarType("bool", "Eq(s0, 2)")]),
    lambda inner: st.lists(st.none() | inner, max_size=3).map(lambda items: TupleType(tuple(items))),
    max_leaves=5,
)


def placeholder(value: object) -> fx.Node:
    node = fx.Graph().placeholder("x")
    if value is not None:
        node.meta["val"] = value
    return node


@given(TYPES)
def test_any_type_reads_back_from_what_it_prints(kind: ValueType) -> None:
    assert parse_type(str(kind)) == kind


def test_values_have_the_types_they_print() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, 5, dtype=torch.bfloat16)
    cases: list[tuple[object, str]] = [
        (torch.ones(2, 3), "f32[2,3]"),
        (torch.tensor(1), "i64[]"),
        (torch.empty(1, dtype=torch.float8_e5m2, device="meta"), "f8e5m2[1]"),
        (fake, "bf16[4,5]"),
        (True, "bool(True)"),
        (3, "int(3)"),
        (1.5, "float(1.5)"),
        ([torch.ones(2), (7, "text")], "(f32[2], (int(7), ?))"),
        (TensorType(torch.int8, ("s0", 2)), "i8[s0,2]"),
    ]
    assert [str(type_of_value(value)) for value, _ in cases] == [text for _, text in cases]
    assert type_of_value("text") is None


@pytest.mark.parametrize("text", ["f33[2]", "f32", "f32[2", "float32[2]", "", "list(3)"])
def test_what_is_not_a_type_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="type") as caught:
        parse_type(text)
    assert repr(text) in str(caught.value)


def test_sizes_are_static_if_all_are_numbers() -> None:
    assert TensorType(torch.float32, (2, 0)).is_static
    assert not TensorType(torch.float32, (2, "s0")).is_static
    assert TensorType(torch.float32, (2, "s0")).rank == 2


def test_facts_of_nodes_are_those_of_their_one_tensor() -> None:
    node = placeholder(torch.empty(2, 0, dtype=torch.int8))
    assert (rank_of(node), dtype_of(node), is_empty(node)) == (2, torch.int8, True)
    assert not is_empty(placeholder(torch.empty(2, 1)))
    for other in (placeholder(None), placeholder(3), placeholder((torch.ones(2), torch.ones(2))), torch.ones(2), None):
        assert (tensor_type(other), rank_of(other), dtype_of(other), is_empty(other)) == (None, None, None, False)


def test_lists_of_nodes_have_the_same_types_one_by_one() -> None:
    one, two = placeholder(torch.ones(2)), placeholder(TensorType(torch.float32, (2,)))
    other = placeholder(torch.ones(3))
    assert same_types([one, other], [two, other])
    assert not same_types([one, other], [other, two])
    assert not same_types([one], [one, one])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a, b", ["a", "b"]),
        ("f(1,2), [3,{4,5}],6", ["f(1,2)", "[3,{4,5}]", "6"]),
        ("", []),
        ("a,", ["a", ""]),
        ("(a,b)", ["(a,b)"]),
    ],
)
def test_text_is_split_outside_brackets_alone(text: str, parts: list[str]) -> None:
    assert split_top_level(text) == parts
