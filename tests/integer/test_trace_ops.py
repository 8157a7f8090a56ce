"""Functions of ATen ops written into a program: the same numbers, types on every node, sizes read at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quantc.errors import RefusedError
from quantc.integer.trace_ops import OpWriter
from quantc.ir.program import Program
from quantc.ir.types import TensorType, type_of
from tests.support.by_hand import Builder, aten

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def frame(*shape: int | str) -> tuple[Program, fx.Node, fx.Node]:
    """A program that yields the negative of its input; with the input and the node of the result."""
    build = Builder()
    x = build.input("x", X)
    root = build.call(aten.neg.default, x)
    for node in (x, root):
        if shape:
            node.meta["val"] = TensorType(torch.float32, shape)
    return build.program(root), x, root


def written(function: Callable[..., Any], *shape: int | str, **named: Any) -> Program:
    """The program with its result replaced by what a function makes of its input."""
    program, x, root = frame(*shape)
    made = OpWriter(program).write(function, (x,), root, **named)
    program.replace(root, made)
    return program


def calls(program: Program) -> list[Any]:
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


def test_a_function_becomes_its_ops_with_the_same_numbers() -> None:
    def function(x: Tensor, *, by: float) -> Any:
        turned = aten.mul.Tensor(aten.transpose.int(x, 0, 1), by)
        return aten.reshape.default(turned, [x.shape[1] * 2, -1])

    program = written(function, by=1.5)
    assert calls(program) == [aten.transpose.int, aten.mul.Tensor, aten.reshape.default]
    assert torch.equal(program(X), function(X, by=1.5))
    assert [str(type_of(node)) for node in program.graph.nodes if node.op == "call_function"] == [
        "f32[6,4]",
        "f32[6,4]",
        "f32[12,2]",
    ]


def test_the_function_may_read_shape_dtype_and_rank() -> None:
    def function(x: Tensor) -> Any:
        assert (tuple(x.shape), x.dtype, x.dim()) == ((4, 6), torch.float32, 2)
        return aten.relu.default(x)

    assert torch.equal(written(function)(X), X.relu())


def test_a_cast_to_its_own_type_is_not_written() -> None:
    def function(x: Tensor) -> Any:
        return aten.to.dtype(aten.to.dtype(x, torch.float32), torch.float64)

    program = written(function)
    assert calls(program) == [aten.to.dtype]
    assert program(X).dtype == torch.float64


def test_results_of_several_tensors_have_items() -> None:
    def function(x: Tensor) -> Any:
        left, right = aten.split.Tensor(x, 3, 1)
        return aten.sub.Tensor(left, right)

    program = written(function)
    assert torch.equal(program(X), X[:, :3] - X[:, 3:])
    assert str(type_of(program.node("sub"))) == "f32[4,3]"


def test_several_results_are_several_nodes() -> None:
    program, x, root = frame()
    found = OpWriter(program).write(lambda x: (aten.relu.default(x), aten.abs.default(x)), (x,), root)
    assert [node.target for node in found] == [aten.relu.default, aten.abs.default]
    assert all(isinstance(node, fx.Node) for node in found)


# -- dynamic sizes -------------------------------------------------------------------------------------------------


def test_a_dynamic_size_is_read_once_where_it_is_needed() -> None:
    def function(x: Tensor) -> Any:
        flat = aten.reshape.default(x, [x.shape[0] * 6])
        return aten.reshape.default(aten.relu.default(flat), [x.shape[0], 6])

    program = written(function, "s0", 6)
    assert calls(program).count(aten.sym_size.int) == 1
    for rows in (1, 4, 9):
        x = torch.randn(rows, 6)
        assert torch.equal(program(x), x.relu())
    assert str(type_of(program.node("relu"))) == "f32[6*s0]"


def test_a_size_that_no_tensor_has_is_calculated() -> None:
    def function(x: Tensor) -> Any:
        return aten.new_zeros.default(x, [x.shape[0] * 2 + 1, x.shape[0] // 2])

    program = written(function, "s0", 6)
    for rows in (2, 5):
        assert tuple(program(torch.ones(rows, 6)).shape) == (2 * rows + 1, rows // 2)


def test_a_size_that_cannot_be_calculated_is_refused() -> None:
    with pytest.raises(RefusedError, match="cannot be calculated where it is needed") as caught:
        written(lambda x: aten.new_zeros.default(x, [x.shape[0] % 3]), "s0", 6)
    assert "fused" in str(caught.value.advice)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_what_is_no_op_of_aten_is_refused() -> None:
    with pytest.raises(TypeError, match="zeros is no op of ATen"):
        written(lambda x: aten.add.Tensor(x, torch.zeros(6)))


def test_a_tensor_of_unknown_type_may_be_used_but_not_asked() -> None:
    program, x, root = frame()
    del x.meta["val"]
    writer = OpWriter(program)
    made = writer.write(aten.relu.default, (x,), root)
    assert type_of(made) is None
    with pytest.raises(RefusedError, match="type of x is unknown"):
        writer.write(lambda x: aten.reshape.default(x, [x.shape[0]]), (x,), root)
