"""Calls that are the identity: each is its operand in torch, or it is not taken for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.ir.types import TensorType
from quantc.rewrite.no_op_calls import CASTS, END, IDENTITIES, ResultMemory, cast_dtype
from tests.support.by_hand import Builder, aten

X = torch.arange(6.0).reshape(2, 3)
EMPTY = torch.empty(0, 3)

SAME: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "alias": (aten.alias.default, (X,), {}),
    "contiguous": (aten.contiguous.default, (X,), {}),
    "clone": (aten.clone.default, (X,), {"memory_format": torch.preserve_format}),
    "reshape": (aten.reshape.default, (X, [2, -1]), {}),
    "expand": (aten.expand.default, (X, [-1, 3]), {}),
    "flatten": (aten.flatten.using_ints, (X, 1), {}),
    "slice": (aten.slice.Tensor, (X, 0, 0, END), {}),
    "slice to the size": (aten.slice.Tensor, (X, 1, 0, 3), {}),
    "cat with nothing": (aten.cat.default, ([EMPTY, X],), {}),
    "repeat once": (aten.repeat.default, (X, [1, 1]), {}),
    "transpose of one": (aten.transpose.int, (X, 1, 1), {}),
    "to": (aten.to.dtype, (X, torch.float32), {}),
    "type_as": (aten.type_as.default, (X, X), {}),
    "to other": (aten.to.other, (X, X), {}),
    "to device": (aten.to.device, (X, torch.device("cpu"), torch.float32), {}),
    "_to_copy": (aten._to_copy.default, (X,), {"dtype": torch.float32}),
}

OTHER: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "another layout": (aten.contiguous.default, (X[None, None],), {"memory_format": torch.channels_last}),
    "another shape": (aten.reshape.default, (X, [3, 2]), {}),
    "every other": (aten.slice.Tensor, (X, 1, 0, END, 2), {}),
    "a part": (aten.slice.Tensor, (X, 1, 1, END), {}),
    "cat of two": (aten.cat.default, ([X, X],), {}),
    "repeat twice": (aten.repeat.default, (X, [2, 1]), {}),
    "repeat with another dim": (aten.repeat.default, (X, [1, 1, 1]), {}),
    "transpose": (aten.transpose.int, (X, 0, 1), {}),
    "a cast": (aten.to.dtype, (X, torch.float64), {}),
    "a cast that copies": (aten.to.dtype, (X, torch.float32, False, True), {}),
    "like another dtype": (aten.type_as.default, (X, torch.ones(1, dtype=torch.float16)), {}),
}


def call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    build, made = Builder(), dict[int, Any]()

    def given(value: Any) -> Any:
        if isinstance(value, list):
            return [given(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = build.input(f"x{len(made)}", value)
        return made[id(value)]

    node = build.call(target, *[given(value) for value in args], **kwargs)
    build.program(node)
    return node


@pytest.mark.parametrize("name", SAME)
def test_an_identity_is_the_operand_whose_value_it_has(name: str) -> None:
    target, args, kwargs = SAME[name]
    find, memory = IDENTITIES[target]
    found = find(call(target, args, kwargs))
    assert found is not None
    result = target(*args, **kwargs)
    assert torch.equal(result, X)
    assert result.dtype is X.dtype
    shares = result.data_ptr() == X.data_ptr()
    assert memory is ResultMemory.EITHER or shares == (memory is ResultMemory.SHARED)


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_anything_is_no_identity(name: str) -> None:
    target, args, kwargs = OTHER[name]
    assert IDENTITIES[target][0](call(target, args, kwargs)) is None


def test_the_part_that_is_not_empty_is_what_cat_gives() -> None:
    node = call(aten.cat.default, ([EMPTY, X],), {})
    assert IDENTITIES[aten.cat.default][0](node) is node.args[0][1]


def test_equal_expressions_are_equal_sizes_and_unknown_types_are_not_equal() -> None:
    node = call(aten.reshape.default, (X, [2, 3]), {})
    for kind in (TensorType(torch.float32, ("s0", 3)), None):
        for each in (node, node.args[0]):
            each.meta["val"] = kind
        assert (IDENTITIES[aten.reshape.default][0](node) is None) == (kind is None)


def test_casts_say_the_dtype_they_give() -> None:
    half = torch.ones(1, dtype=torch.float16)
    assert cast_dtype(call(aten.to.dtype, (X, torch.int8), {})) is torch.int8
    assert cast_dtype(call(aten.to.other, (X, half), {})) is torch.float16
    assert cast_dtype(call(aten._to_copy.default, (X,), {})) is torch.float32
    assert cast_dtype(call(aten.to.device, (X, torch.device("cpu"), torch.float64), {})) is torch.float64
    assert cast_dtype(call(aten._to_copy.default, (X,), {"device": "meta"})) is None
    assert cast_dtype(call(aten.relu.default, (X,), {})) is None
    assert set(IDENTITIES) >= CASTS
