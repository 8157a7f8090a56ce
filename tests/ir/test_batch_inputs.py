"""Batches of a data set as the inputs of a program: by position, by name, alone, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from quantc.errors import CalibrationError, InputError
from quantc.ir.batch_inputs import (
    Picked,
    batch_of,
    cast_floats,
    check_batches,
    leaves_of,
    samples_in,
    select_inputs,
    taken_of,
)
from quantc.ir.program import Program
from quantc.ir.signature import Input, Signature
from quantc.ir.types import TensorType

X, MASK = torch.ones(2, 3), torch.zeros(2, 3)


def program(positional: tuple[str, ...], keywords: tuple[str, ...] = ()) -> Program:
    """A program that gives its first input back; all are f32[2,3]."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in (*positional, *keywords)]
    graph.output((nodes[0],))
    inputs = tuple(Input(node.name, TensorType(torch.float32, (2, 3))) for node in nodes)
    in_spec = pytree.tree_structure(((0,) * len(positional), dict.fromkeys(keywords, 0)))
    return Program(graph, nn.Module(), Signature(inputs, in_spec, pytree.tree_structure(0)), name="net")


def same(leaves: list[Any], *expected: Tensor) -> bool:
    return len(leaves) == len(expected) and all(a is b for a, b in zip(leaves, expected, strict=True))


# -- what a batch is ---------------------------------------------------------------------------------------------------


def test_one_argument_is_a_batch_alone_or_in_a_tuple_or_by_name() -> None:
    net = program(("x",))
    for batch in (X, (X,), [X], {"x": X}):
        assert same(leaves_of(net, batch, 0), X)


def test_arguments_come_in_order_or_by_name_in_any_order() -> None:
    net = program(("x",), ("mask",))
    assert same(leaves_of(net, {"mask": MASK, "x": X}, 0), X, MASK)
    assert same(leaves_of(net, (X, MASK), 0), X, MASK), "keywords follow the positional ones"
    assert same(leaves_of(program(("x", "mask")), [X, MASK], 0), X, MASK)


def test_parameters_that_torch_renames_go_by_their_own_name() -> None:
    assert same(leaves_of(program(("input_1",)), {"input": X}, 0), X)


def test_arrays_are_taken_for_tensors() -> None:
    (leaf,) = leaves_of(program(("x",)), np.ones((2, 3), dtype=np.float32), 0)
    assert torch.equal(leaf, X)


def test_flat_inputs_and_batches_are_inverse() -> None:
    positional, by_name = program(("x", "y")), program(("x",), ("mask",))
    assert batch_of(positional, [X, MASK]) == (X, MASK)
    assert batch_of(by_name, [X, MASK]) == {"x": X, "mask": MASK}
    for net in (positional, by_name):
        assert same(leaves_of(net, batch_of(net, [X, MASK]), 0), X, MASK)


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_labels_in_a_batch_are_refused_with_the_line_to_write() -> None:
    with pytest.raises(InputError, match="batch 4") as caught:
        leaves_of(program(("x",)), (X, torch.tensor([1, 2])), 4)
    assert caught.value.where is not None
    assert caught.value.where.startswith("batch 4")
    assert caught.value.advice is not None
    assert "inputs=0" in caught.value.advice


def test_a_mapping_with_other_keys_is_refused_with_both_lists() -> None:
    with pytest.raises(InputError, match="it has image, x, and the model takes x") as caught:
        leaves_of(program(("x",)), {"image": X, "x": X}, 0)
    assert caught.value.advice is not None
    assert "inputs='x'" in caught.value.advice


def test_a_tensor_of_another_size_or_dtype_is_refused_by_its_batch() -> None:
    net = program(("x",))
    with pytest.raises(InputError, match=r"batch 1 .* size 4"):
        leaves_of(net, torch.ones(2, 4), 1)
    with pytest.raises(InputError, match=r"batch 0 .* f64"):
        leaves_of(net, X.double(), 0)


@pytest.mark.parametrize("batches", [X, {"x": X}, "text", b"bytes", 3, None], ids=lambda value: type(value).__name__)
def test_what_does_not_hold_batches_is_refused_by_its_type(batches: Any) -> None:
    with pytest.raises(CalibrationError, match=type(batches).__name__):
        check_batches(batches)


def test_anything_that_can_be_gone_through_holds_batches() -> None:
    check_batches([X])
    check_batches(iter([X]))


# -- picking -----------------------------------------------------------------------------------------------------------


def test_inputs_are_picked_by_index_key_several_or_a_function() -> None:
    net = program(("x", "mask"))
    pair, named = (X, MASK, 7), {"ids": X, "m": MASK}
    cases: list[tuple[Any, Any, Any]] = [
        (pair, 0, (X,)),
        (named, "ids", (X,)),
        (pair, (1, 0), (MASK, X)),
        (named, ["m"], (MASK,)),
        (pair, lambda batch: batch[2], 7),
        ({"x": X, "mask": MASK, "label": 3}, ("mask", "x"), {"mask": MASK, "x": X}),
    ]
    for batch, inputs, expected in cases:
        assert list(select_inputs([batch], inputs, net)) == [expected]
    everything = [pair]
    assert select_inputs(everything, None, net) is everything


def test_floats_are_cast_and_nothing_else() -> None:
    tree = {"a": [X.double(), torch.tensor([1])], "b": "text", "c": np.zeros(2)}
    made = cast_floats(tree, torch.float16)
    assert [made["a"][0].dtype, made["a"][1].dtype, made["c"].dtype] == [torch.float16, torch.int64, torch.float16]
    assert made["b"] == "text"
    (batch,) = select_inputs([(X,)], None, program(("x",)), torch.bfloat16)
    assert batch[0].dtype is torch.bfloat16


def test_picked_batches_have_the_length_of_the_batches_if_that_is_known() -> None:
    assert len(Picked([X, X], 0, ("x",))) == 2

    def endless() -> Iterator[Tensor]:
        yield X

    with pytest.raises(TypeError):
        len(Picked(endless(), 0, ("x",)))


@pytest.mark.parametrize(
    ("batch", "keys", "told"),
    [
        ({"a": 1, "b": 2}, ["c"], "it holds a, b"),
        ((1, 2), [5], "it holds 2 items"),
        (3, ["x"], "it holds a int"),
        ({}, ["c"], "nothing"),
    ],
)
def test_an_item_that_a_batch_lacks_is_refused_with_what_it_holds(batch: Any, keys: list[Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        taken_of(batch, keys, 3)
    assert "batch 3" in caught.value.what


@pytest.mark.parametrize("inputs", [1.5, {"x": 0}, [0, None, 1.5], True])
def test_inputs_are_named_by_numbers_and_strings(inputs: Any) -> None:
    with pytest.raises(InputError, match=type(inputs).__name__):
        select_inputs([X], inputs, program(("x",)))


def test_samples_are_counted_where_all_tensors_agree() -> None:
    assert samples_in([X, MASK, 7, torch.tensor(1.0)]) == 2
    assert samples_in([X, torch.ones(3)]) is None
    assert samples_in([torch.tensor(1.0)]) is None
