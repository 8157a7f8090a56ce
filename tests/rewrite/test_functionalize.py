"""Ops that write, as ops that return: found by schema, and only where the result has the type of what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.ir.dialect import writes
from quantc.ir.program import Program
from quantc.rewrite.functionalize import functional_form, functional_overload, reshaping_form, returning_overload
from tests.support.by_hand import Builder, aten
from tests.support.programs import signature_of


def form_of(target: Any, *args: Any, **kwargs: Any) -> fx.Node | None:
    """The functional form of a call on a copy of the first tensor; tensors among the arguments are inputs."""
    build, count = Builder(), iter(range(9))

    def given(value: Any) -> Any:
        return build.input(f"x{next(count)}", value) if isinstance(value, Tensor) else value

    node = build.call(
        target, *[given(value) for value in args], **{name: given(value) for name, value in kwargs.items()}
    )
    return functional_form(build.program(node), node)


FLOATS, INTS, BOOLS = torch.tensor([0.5, -2.0]), torch.tensor([3, -4]), torch.tensor([True, False])


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.relu_.default, aten.relu.default),
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.pow_.Scalar, aten.pow.Tensor_Scalar),
        (aten.transpose_.default, aten.transpose.int),
        (aten.__iand__.Tensor, aten.bitwise_and.Tensor),
        (aten.masked_fill_.Scalar, aten.masked_fill.Scalar),
        (aten.relu.default, None),
    ],
    ids=str,
)
def test_an_op_that_writes_has_an_overload_that_returns(target: Any, expected: Any) -> None:
    assert functional_overload(target) is expected
    assert expected is None or writes(expected) == ()


def test_ops_that_reshape_in_place_are_views() -> None:
    assert reshaping_form(aten.unsqueeze_.default) is aten.unsqueeze.default
    assert reshaping_form(aten.t_.default) is aten.t.default
    assert reshaping_form(aten.relu_.default) is None


def test_calls_with_out_have_one_without() -> None:
    assert returning_overload(aten.add.out) is aten.add.Tensor
    assert returning_overload(aten.mul.Scalar_out) is aten.mul.Scalar
    assert returning_overload(aten.max.dim_max) is None, "it writes two"
    assert returning_overload(aten.relu_.default) is None
    assert returning_overload(aten.relu.default) is None


SAME: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "relu_": (aten.relu_.default, (FLOATS,)),
    "a number": (aten.add_.Scalar, (FLOATS, 2)),
    "an int to ints": (aten.mul_.Scalar, (INTS, 2)),
    "tensors of one dtype": (aten.sub_.Tensor, (FLOATS, FLOATS)),
    "a test of truth values": (aten.logical_not_.default, (BOOLS,)),
    "a mask": (aten.masked_fill_.Scalar, (FLOATS, BOOLS, 1.0)),
    "an index": (aten.index_fill_.int_Scalar, (FLOATS, 0, torch.tensor([1]), 1.0)),
}


@pytest.mark.parametrize("name", SAME)
def test_the_functional_form_computes_what_is_written(name: str) -> None:
    target, args = SAME[name]
    form = form_of(target, *args)
    assert form is not None
    values = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    made: Any = form.target
    result = made(*values)
    target(*values)
    assert torch.equal(result, values[0])
    assert result.dtype is values[0].dtype


PROMOTED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "a wider tensor": (aten.add_.Tensor, (FLOATS, FLOATS.double())),
    "a tensor of ints on floats": (aten.add_.Tensor, (FLOATS, INTS)),
    "a test that writes numbers": (aten.eq_.Scalar, (FLOATS, 0.5)),
    "a test of numbers": (aten.logical_not_.default, (FLOATS,)),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_what_torch_may_promote_stays_in_place(name: str) -> None:
    target, args = PROMOTED[name]
    assert form_of(target, *args) is None


def test_overwriting_a_whole_tensor_is_a_copy_of_the_source() -> None:
    form = form_of(aten.copy_.default, FLOATS, FLOATS + 1)
    assert form is not None
    assert (form.target, [node.name for node in form.all_input_nodes]) == (aten.clone.default, ["x1"])
    assert form_of(aten.copy_.default, FLOATS, torch.ones(1)) is None, "it is broadcast"
    assert form_of(aten.copy_.default, FLOATS, FLOATS.double()) is None, "it is cast"


def test_a_result_with_out_must_have_the_dtype_of_what_is_written() -> None:
    form = form_of(aten.add.out, FLOATS, FLOATS, out=torch.empty(2))
    assert form is not None
    assert (form.target, form.kwargs) == (aten.add.Tensor, {})
    assert form_of(aten.add.out, FLOATS, FLOATS, out=torch.empty(2, dtype=torch.float64)) is None


def test_without_types_one_tensor_alone_is_not_promoted() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    alone = graph.call_function(aten.add_.Scalar, (x, 1))
    both = graph.call_function(aten.add_.Tensor, (x, y))
    test = graph.call_function(aten.eq_.Scalar, (x, 1))
    wide = graph.call_function(aten.add_.Scalar, (x, 1j))
    function = graph.call_function(torch.relu, (x,))
    graph.output((x,))
    program = Program(graph, nn.Module(), signature_of(graph, 1))
    made = functional_form(program, alone)
    assert made is not None
    assert made.target is aten.add.Scalar
    for node in (both, test, wide, function):
        assert functional_form(program, node) is None
