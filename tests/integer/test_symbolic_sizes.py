"""Sizes of types as torch's symbols and back: what is calculated with them reads as the program would write it."""

from __future__ import annotations

from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor

from quantc.integer.symbolic_sizes import FIRST_SIZE, Sizes
from quantc.ir.types import TensorType
from tests.support.by_hand import Builder, aten


def sizes(*shape: int | str) -> Sizes:
    """The symbols of a program with one tensor of that shape."""
    build = Builder()
    x = build.input("x", torch.zeros([size if isinstance(size, int) else 4 for size in shape]))
    x.meta["val"] = TensorType(torch.float32, shape)
    y = build.graph.call_function(aten.relu.default, (x,))
    y.meta["val"] = x.meta["val"]
    return Sizes(build.program(y))


def kind(*shape: int | str, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType(dtype, shape)


def texts(found: Sizes, tensor: Tensor) -> list[int | str]:
    return [found.text(size) for size in tensor.shape]


def same(left: Any, right: Any) -> bool:
    return bool(sympy.simplify(sympy.sympify(f"({left}) - ({right})")) == 0)


def test_static_sizes_need_no_symbols() -> None:
    found = sizes(2, 3)
    tensor = found.tensor(kind(2, 3, dtype=torch.int8))
    assert (tensor.device.type, tensor.dtype, tuple(tensor.shape)) == ("meta", torch.int8, (2, 3))
    made = found.run(aten.cat.default, ([tensor, tensor], 1), {})
    assert texts(found, made) == [2, 6]
    assert found.run(aten.arange.default, (5,), {}).device.type == "meta"  # made of numbers alone


@pytest.mark.parametrize("size", ["s0", "2*s0", "s0 + 1", "s0*s1", "3*s0 + s1 - 2", "s0//2"])
def test_an_expression_reads_back(size: str) -> None:
    found = sizes("s0", "s1")
    (text, number) = texts(found, found.tensor(kind(size, 7)))
    assert number == 7
    expected = size.replace("s0//2", "floor(s0/2)")
    assert same(str(text).replace("((s0//2))", "floor(s0/2)").replace("(s0//2)", "floor(s0/2)"), expected)


def test_what_is_calculated_is_an_expression_of_the_programs_symbols() -> None:
    found = sizes("s0", 4)
    x = found.tensor(kind("s0", 4))
    joined = found.run(aten.cat.default, ([x, x, x], 0), {})
    flat = found.run(aten.reshape.default, (joined, [-1]), {})
    assert texts(found, joined)[1] == 4
    assert same(texts(found, joined)[0], "3*s0")
    assert same(texts(found, flat)[0], "12*s0")


def test_one_name_is_one_symbol_and_two_names_are_two() -> None:
    found = sizes("s0", "s1")
    first, second, third = (found.tensor(kind(*shape)) for shape in (("s0", 2), ("s0", 2), ("s1", 2)))
    assert found.run(aten.add.Tensor, (first, second), {}).shape[1] == 2
    assert texts(found, first) == texts(found, second) != texts(found, third)
    hints = {int(tensor.shape[0].node.hint) for tensor in (first, third)}  # type: ignore[attr-defined]
    assert len(hints) == 2
    assert all(hint > FIRST_SIZE and sympy.isprime(hint) for hint in hints)


def test_an_expression_that_cannot_be_calculated_stays_whole() -> None:
    found = sizes("s0", "s1")
    text = found.text(found.tensor(kind("CeilToInt(s0/3)", 2)).shape[0])
    assert text == "(CeilToInt(s0/3))"
    assert found.text(5) == 5
