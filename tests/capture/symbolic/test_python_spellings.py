"""Overload resolution: a Python call and the ATen overload it is resolved to compute the same."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantc.capture.symbolic.python_spellings import (
    CASTS,
    DUNDERS,
    OPERATORS,
    RENAMED,
    ArgumentKind,
    SpelledCall,
    is_builtin,
    overloads,
    packet,
    resolve,
)

aten = torch.ops.aten
X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def nothing(_: Any) -> None:
    """The kind of plain values."""


def kinds(**named: ArgumentKind) -> Callable[[Any], ArgumentKind | None]:
    """Kinds of stand-ins that are written as text."""
    return lambda value: named.get(value) if isinstance(value, str) else None


CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("add", (X, X), {}, "add.Tensor"),
    ("add", (X, 2), {}, "add.Tensor"),
    ("add", (X, X), {"alpha": 3}, "add.Tensor"),
    ("pow", (X, 2), {}, "pow.Tensor_Scalar"),
    ("pow", (2, X), {}, "pow.Scalar"),
    ("sum", (X,), {}, "sum.default"),
    ("sum", (X, 1), {}, "sum.dim_IntList"),
    ("sum", (X,), {"axis": 0, "keepdims": True}, "sum.dim_IntList"),
    ("mean", (), {"input": X, "dim": 1}, "mean.dim"),
    ("max", (X,), {}, "max.default"),
    ("max", (X, 1), {}, "max.dim"),
    ("max", (X, X), {}, "max.other"),
    ("clamp", (X, 0, 1), {}, "clamp.default"),
    ("clamp", (X,), {"max": X}, "clamp.Tensor"),
    ("cat", ([X, X], 1), {}, "cat.default"),
    ("transpose", (X, 0, 1), {}, "transpose.int"),
    ("zeros", ([2, 3],), {}, "zeros.default"),
    ("arange", (3,), {}, "arange.default"),
    ("arange", (1, 7, 2), {}, "arange.start_step"),
    ("softmax", (X, 1), {}, "softmax.int"),
    ("where", (X > 2, X, 0.0), {}, "where.ScalarOther"),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "overload"), CALLS, ids=[f"{row[0]}-{row[3]}" for row in CALLS])
def test_the_overload_computes_what_the_python_function_does(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], overload: str
) -> None:
    op = packet(name)
    assert op is not None
    found = resolve(op, args, kwargs, nothing)
    assert found is not None
    assert str(found.overload) == f"aten.{overload}"
    expected = getattr(torch, name)(*args, **kwargs)
    actual = found.overload(*found.args, **found.kwargs)
    pairs = zip(expected, actual, strict=True) if isinstance(expected, tuple) else [(expected, actual)]
    assert all(torch.equal(left, right) for left, right in pairs)


def test_numbers_are_widened_to_the_lists_that_a_schema_wants() -> None:
    found = resolve(aten.max_pool2d, (torch.ones(1, 1, 4, 4), 2), {"stride": torch.Size([1, 1])}, nothing)
    assert found is not None
    assert found.args[1:] == ([2, 2], [1, 1])
    assert type(found.args[2]) is list


def test_a_call_that_fits_no_overload_is_not_resolved() -> None:
    assert resolve(aten.relu, (), {}, nothing) is None
    assert resolve(aten.relu, (X, X), {}, nothing) is None
    assert resolve(aten.relu, ("text",), {}, nothing) is None
    assert resolve(aten.sum, (X,), {"self": X}, nothing) is None  # given twice
    assert resolve(aten.sum, (X,), {"nonsense": 1}, nothing) is None
    assert resolve(aten.cat, ([X, 3],), {}, nothing) is None


def test_options_that_change_nothing_are_dropped() -> None:
    found = resolve(aten.zeros, ([2],), {"requires_grad": False, "out": None}, nothing)
    assert found is not None
    assert found.kwargs == {}
    assert resolve(aten.zeros, ([2],), {"requires_grad": True}, nothing) is None


def test_traced_values_are_resolved_by_their_kind() -> None:
    given = kinds(
        t=ArgumentKind.TENSOR,
        n=ArgumentKind.NUMBER,
        s=ArgumentKind.SHAPE,
        q=ArgumentKind.SEQUENCE,
        d=ArgumentKind.DTYPE,
    )
    for op, args, overload in (
        (aten.add, ("t", "n"), "add.Tensor"),
        (aten.pow, ("t", "n"), "pow.Tensor_Scalar"),
        (aten.pow, ("t", "t"), "pow.Tensor_Tensor"),
        (aten.view, ("t", "s"), "view.default"),
        (aten.view, ("t", ["n", -1]), "view.default"),
        (aten.cat, ("q",), "cat.default"),
        (aten.to, ("t", "d"), "to.dtype"),
    ):
        found = resolve(op, args, {}, given)
        assert found is not None, op
        assert str(found.overload) == f"aten.{overload}"


def test_out_selects_the_overloads_that_write_there() -> None:
    found = resolve(aten.add, (X, X), {"out": torch.empty(2, 2)}, nothing)
    assert found is not None
    assert str(found.overload) == "aten.add.out"
    assert {row._overloadname for row in overloads(aten.relu, SpelledCall.OUT)} == {"out"}
    assert [row._overloadname for row in overloads(aten.relu)] == ["default"]


@pytest.mark.parametrize("function", OPERATORS, ids=lambda function: str(function.__name__))
def test_each_operator_has_the_op_that_computes_it(function: Callable[..., Any]) -> None:
    left, right = torch.tensor([7, 2, 5]), torch.tensor([2, 1, 3])
    if function is operator.matmul:
        left, right = left.reshape(1, 3), right.reshape(3, 1)
    if function in (operator.itruediv, operator.truediv):
        left, right = left.double(), right.double()
    args = (left,) if function in (operator.neg, operator.pos, operator.invert, operator.abs) else (left, right)
    op = packet(OPERATORS[function])
    assert op is not None
    expected = function(*(arg.clone() for arg in args))
    assert torch.equal(op(*(arg.clone() for arg in args)), expected)


def test_reflected_operators_swap_their_operands() -> None:
    assert DUNDERS["__rsub__"](2, 7) == 5
    assert DUNDERS["__rtruediv__"](2, 7) == 3.5
    assert DUNDERS["__rpow__"](2, 7) == 49
    assert DUNDERS["__sub__"](2, 7) == -5


@pytest.mark.parametrize("name", RENAMED)
def test_aliases_are_other_names_of_the_same_function(name: str) -> None:
    op: Any = packet(name)
    assert op is getattr(aten, RENAMED[name])
    if name.startswith("concat"):
        assert torch.equal(op([X, X]), getattr(torch, name)([X, X]))
    elif name in ("negative", "absolute"):
        assert torch.equal(op(-X), getattr(torch, name)(-X))


@pytest.mark.parametrize("name", CASTS)
def test_casts_are_those_of_tensor(name: str) -> None:
    assert getattr(torch.ones(1), name)().dtype == CASTS[name]


def test_names_of_nothing_and_functions_in_python_are_told_apart() -> None:
    assert packet("no_such_op") is None
    assert is_builtin(torch.relu)
    assert is_builtin(torch.Tensor.add)
    assert is_builtin(torch.nn.functional.linear)
    assert not is_builtin(torch.nn.functional.interpolate)
