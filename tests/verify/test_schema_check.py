"""Calls against their schemas: every mismatch, in words; what torch accepts passes."""

from __future__ import annotations

import pytest
import torch

from quantc.ir.types import ScalarType
from quantc.verify.schema_check import why_not_call
from tests.support.programs import Builder, aten


def faults(target: object, *args: object, **kwargs: object) -> list[str]:
    """What is wrong with a call; the strings "x", "y", "pair", "size" and "unknown" stand for nodes."""
    build = Builder()
    x, y = build.input("x", 2, 4), build.input("y", 2, 4)
    pair = build.call(aten.split.Tensor, x, 1)
    size = build.call(aten.sym_size.int, x, 0)
    size.meta["val"] = ScalarType("int", "2")
    nodes = {"x": x, "y": y, "pair": pair, "size": size, "unknown": build.graph.placeholder("unknown")}

    def node(value: object) -> object:
        if isinstance(value, list):
            return [node(item) for item in value]
        return nodes.get(value, value) if isinstance(value, str) else value

    made = build.graph.create_node(
        "call_function",
        target,  # type: ignore[arg-type]
        tuple(node(value) for value in args),  # type: ignore[misc]
        {name: node(value) for name, value in kwargs.items()},  # type: ignore[misc]
    )
    return list(why_not_call(made, target))  # type: ignore[arg-type]


def call(target: object, *args: object, **kwargs: object) -> str:
    """The one fault of a call."""
    (fault,) = faults(target, *args, **kwargs)
    return fault


def test_too_many_arguments() -> None:
    assert call(aten.relu.default, "x", 1) == "relu takes 1 arguments by position, not 2"
    assert call(aten.add.Tensor, "x", "y", 2) == "add takes 2 arguments by position, not 3"


def test_missing_argument() -> None:
    assert call(aten.conv2d.default, "x") == "the argument 'w' is missing"


def test_unknown_keyword() -> None:
    assert call(aten.add.Tensor, "x", "y", beta=2) == "add has no argument 'beta'"


def test_argument_given_twice() -> None:
    assert call(aten.add.Tensor, "x", "y", other="x") == "the argument 'y' is given twice"


@pytest.mark.parametrize(
    "value", ["text", None, 2.0, [1], torch.float32], ids=["str", "None", "number", "list", "dtype"]
)
def test_tensor_expected(value: object) -> None:
    assert call(aten.relu.default, value).startswith("argument 'x' must be a tensor, not ")


def test_tuple_where_a_tensor_is_expected() -> None:
    assert call(aten.relu.default, "pair").startswith("argument 'x' must be a tensor, and %split is (")
    assert call(aten.add.Tensor, "x", "pair").startswith("argument 'y' must be a tensor, and %split is (")
    assert call(aten.add.Tensor, "x", other="pair").startswith("argument 'other' must be a tensor, and %split is (")


def test_number_where_a_tensor_is_expected() -> None:
    assert call(aten.relu.default, "size") == "argument 'x' must be a tensor, and %sym_size is int(2)"


def test_list_of_tensors() -> None:
    assert call(aten.cat.default, "x").startswith("argument 'xs' must be a list of tensors, and %x is ")
    assert call(aten.cat.default, ["x", 3]) == "argument 'xs' must be a tensor, not 3"
    assert call(aten.cat.default, 3) == "argument 'xs' must be a list of tensors, not 3"


def test_calls_that_torch_accepts_pass() -> None:
    """Numbers for the second operand of arithmetic, None among indices, a list-valued node for a list."""
    assert faults(aten.add.Tensor, "x", 2) == []
    assert faults(aten.mul.Tensor, "x", 0.5) == []
    assert faults(aten.add.Tensor, "x", "size") == []
    assert faults(aten.add.Tensor, "x", other="y", alpha=2) == []
    assert faults(aten.index.Tensor, "x", [None, "y"]) == []
    assert faults(aten.cat.default, "pair") == []
    assert faults(aten.cat.default, "unknown") == []
    assert faults(aten.relu.default, "unknown") == []
    assert faults(aten.clamp.default, "x", None, 6.0) == []
    assert faults(aten.linear.default, "x", "y", None) == []
    assert faults(aten.layer_norm.default, "x", [4], eps=1e-6) == []


def test_every_fault_is_told() -> None:
    assert faults(aten.conv2d.default, 3, bias="pair", speed=2) == [
        "argument 'x' must be a tensor, not 3",
        "argument 'bias' must be a tensor, and %split is (f32[1,4], f32[1,4])",
        "conv2d has no argument 'speed'",
        "the argument 'w' is missing",
    ]


def test_long_values_are_cut() -> None:
    told = call(aten.relu.default, "z" * 500)
    assert len(told) < 120
    assert told.endswith("...")


@pytest.mark.parametrize("name", ["add", "mul", "relu", "matmul", "where", "maximum"])
def test_numbers_pass_exactly_where_torch_takes_them(name: str) -> None:
    """The oracle is torch itself: call the op with a number as its last tensor."""
    target = {
        "add": aten.add.Tensor,
        "mul": aten.mul.Tensor,
        "relu": aten.relu.default,
        "matmul": aten.matmul.default,
        "where": aten.where.self,
        "maximum": aten.maximum.default,
    }[name]
    tensors: list[object] = [torch.ones(2, 2) for _ in target._schema.arguments if str(_.type) == "Tensor"]
    if name == "where":
        tensors[0] = torch.ones(2, 2, dtype=torch.bool)
    try:
        target(*tensors[:-1], 2.0)
        torch_takes_it = True
    except (RuntimeError, TypeError):
        torch_takes_it = False
    found = faults(target, *["x"] * (len(tensors) - 1), 2.0)
    assert (found == []) == torch_takes_it
