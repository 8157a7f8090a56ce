"""Lowering of Python calls to ATen: the overloads that eager torch reaches, and refusals of what a graph cannot hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.capture.export.dimensions import DynamicDim
from quantc.capture.refused_trace import RefusedError
from tests.support.symbolic_traces import traced

X = torch.arange(6.0).reshape(2, 3) - 2
ROWS = {(0, 0): DynamicDim("rows", 2, None)}
CASES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "function": (lambda s, x: torch.relu(x), ["relu.default"]),
    "method": (lambda s, x: x.relu(), ["relu.default"]),
    "overload": (lambda s, x: torch.ops.aten.relu.default(x), ["relu.default"]),
    "packet": (lambda s, x: torch.ops.aten.add(x, x), ["add.Tensor"]),
    "number minus tensor": (lambda s, x: 2 - x, ["rsub.Scalar"]),
    "number by tensor": (lambda s, x: 1.5 / (x + 5), ["add.Tensor", "reciprocal.default", "mul.Tensor"]),
    "number times tensor": (lambda s, x: 2 * x, ["mul.Tensor"]),
    "spread sizes": (lambda s, x: x.reshape(3, 2), ["reshape.default"]),
    "sizes in a tuple": (lambda s, x: x.reshape((3, 2)), ["reshape.default"]),
    "cast": (lambda s, x: x.double(), ["to.dtype"]),
    "cast by type": (lambda s, x: x.type(torch.LongTensor), ["to.dtype"]),
    "cast by name": (lambda s, x: x.type("torch.HalfTensor"), ["to.dtype"]),
    "to itself": (lambda s, x: x.to(torch.float32) + 1, ["add.Tensor"]),
    "to another": (lambda s, x: x.to(torch.zeros(1, dtype=torch.int32)), ["zeros.default", "to.dtype"]),
    "to the cpu": (lambda s, x: x.cpu().to("cpu") + 1, ["add.Tensor"]),
    "new tensor": (lambda s, x: x + x.new_tensor([1, 2, 3]), ["to.dtype", "add.Tensor"]),
    "split in Python": (lambda s, x: x.split(1)[0] + 0, ["split.Tensor", "add.Tensor"]),
    "shape arithmetic": (lambda s, x: x * (x.size(0) + x.numel() // x.dim()), ["mul.Tensor"]),
    "constants": (lambda s, x: x + torch.zeros(2, 3), ["zeros.default", "add.Tensor"]),
    "math on numbers": (lambda s, x: x * math.sqrt(x.shape[1] + 1), ["mul.Tensor"]),
    "bits": (lambda s, x: (x > 0) & (x < 2), ["gt.Scalar", "lt.Scalar", "__and__.Tensor"]),
    "dunder": (lambda s, x: x.__rsub__(1), ["rsub.Scalar"]),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_become_overloads_that_compute_the_same(name: str) -> None:
    forward, names = CASES[name]
    trace = traced(forward, X)
    assert [call for call in trace.names if "getitem" not in call] == names
    assert torch.equal(trace(X), forward(None, X))


def test_in_place_operators_write_to_tensors_and_rebind_numbers() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        count = x.shape[0]
        count += 5
        y = x + 0
        y *= count
        return y

    trace = traced(forward, X)
    assert trace.names == ["add.Tensor", "mul_.Tensor"]
    assert torch.equal(trace(X), X * 7)
    opened = traced(forward, X, marks=ROWS)
    assert not any("iadd" in name for name in opened.names)
    assert torch.equal(opened(X[:1].repeat(3, 1)), X[:1].repeat(3, 1) * 8)


@pytest.mark.parametrize(
    ("forward", "word"),
    [
        (lambda s, x: x * x.sum().item(), "item"),
        (lambda s, x: x + len(x.tolist()), "tolist"),
        (lambda s, x: x.type("torch.Nonsense"), "Nonsense"),
    ],
)
def test_python_values_of_tensors_are_refused(forward: Callable[..., Any], word: str) -> None:
    with pytest.raises(RefusedError, match=word):
        traced(forward, X)


def test_arguments_that_no_overload_takes_are_an_error_of_the_model() -> None:
    with pytest.raises(TypeError, match="relu"):
        traced(lambda s, x: x.relu(3), X)


def test_open_sizes_are_computed_in_the_graph() -> None:
    trace = traced(lambda s, x: x.reshape(x.shape[0] * 3) * math.sqrt(x.shape[0]), X, marks=ROWS)
    assert "sym_size.int" in trace.names
    for rows in (2, 5):
        given = torch.ones(rows, 3)
        assert torch.allclose(trace(given), given.reshape(-1) * math.sqrt(rows))


def test_functions_of_math_that_need_a_number_are_refused_for_open_sizes() -> None:
    with pytest.raises(RefusedError, match="log2"):
        traced(lambda s, x: x * math.log2(x.shape[0]), X, marks=ROWS)


def test_whole_shapes_are_followed_where_no_rank_is_known() -> None:
    trace = traced(lambda s, x: x.view(x.size()).sum() * x.shape.numel())
    for given in (X, torch.ones(2, 2, 2)):
        assert float(trace(given)) == float(given.sum()) * given.numel()
