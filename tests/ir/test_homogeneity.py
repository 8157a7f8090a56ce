"""Homogeneity of ops: what the rows say, held to the ops themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from quantc.ir.curves import Curve
from quantc.ir.dialect import BY_NAME, OPS
from quantc.ir.homogeneity import is_homogeneous, scales_too, scaling_operands, upper_bound

X, Y = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
CALLS: dict[str, tuple[Any, ...]] = {
    "add": (X, Y), "sub": (X, Y), "maximum": (X, Y), "minimum": (X, Y), "mul": (X, Y), "div": (X, Y), "matmul": (X, Y),
    "where": (X > 0, X, Y), "masked_fill": (X, Y > 0, 0.0), "prelu": (X, torch.rand(3)), "neg": (X,), "abs": (X,),
    "mean": (X, [2]), "sum": (X, [2]), "amax": (X, [2]), "amin": (X, [2]), "sdpa": (X, Y, X),
    "upsample_linear1d": (X[0], [8], True, None), "upsample_bilinear2d": (X, [8, 8], True, None),
    "avg_pool1d": (X[0], [2]), "avg_pool2d": (X, [2, 2]), "avg_pool3d": (X, [2, 2, 2]),
    "adaptive_avg_pool1d": (X[0], [2]), "adaptive_avg_pool2d": (X, [2, 2]), "adaptive_avg_pool3d": (X, [2, 2, 2]),
    "dropout": (X, 0.5, False), "feature_dropout": (X, 0.5, False), "alpha_dropout": (X, 0.5, False),
    "feature_alpha_dropout": (X, 0.5, False),
}  # fmt: skip


def call(name: str, args: tuple[Any, ...]) -> fx.Node:
    """A node that calls an op on tensors that are its operands."""
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") if isinstance(arg, torch.Tensor) else arg for i, arg in enumerate(args)]
    return graph.call_function(BY_NAME[name].target, tuple(inputs))


def test_every_op_with_a_row_is_checked() -> None:
    assert set(CALLS) == {op.name for op in OPS if op.scales}


@pytest.mark.parametrize("name", sorted(CALLS))
def test_multiplying_a_set_multiplies_the_result(name: str) -> None:
    op, args = BY_NAME[name], CALLS[name]
    expected = op.target(*args)
    for names in scaling_operands(call(name, args)):
        places = [op.operands.index(each) for each in names]
        scaled = tuple(4 * arg if index in places else arg for index, arg in enumerate(args))
        torch.testing.assert_close(op.target(*scaled), 4 * expected)


def test_functions_of_one_number_are_asked_themselves() -> None:
    """A line on either side of zero, and nothing else."""
    proportional = {op.name for op in OPS if op.curve and op.name != "clamp" and scaling_operands(call(op.name, (X,)))}
    assert proportional == {"relu", "leaky_relu"}
    assert is_homogeneous(Curve(torch.abs))
    assert not is_homogeneous(Curve(lambda x: x + 1e-9))
    assert not is_homogeneous(Curve(lambda x: x.clamp(max=1e9)))


def test_clamps() -> None:
    def clamped(*bounds: float | None) -> tuple[bool, float | None]:
        node = call("clamp", (X, *bounds))
        return bool(scaling_operands(node)), upper_bound(node)

    assert clamped(0.0) == (True, None)
    assert clamped(0.0, 6.0) == (False, 6.0)
    assert clamped(None, 3) == (False, 3.0)
    assert clamped(-1.0, 1.0) == (False, None)
    assert clamped(None, 0.0) == (True, None)


def test_numbers_that_any_factor_leaves_alone() -> None:
    assert [number for number in (0.0, -0.0, 1.0, -3.5, float("inf"), float("-inf")) if not scales_too(number)] == [
        1.0,
        -3.5,
    ]


def test_padding_and_dropout_by_their_options() -> None:
    assert scaling_operands(call("pad", (X, [1, 1])))
    assert not scaling_operands(call("pad", (X, [1, 1], "constant", 1.0)))
    assert scaling_operands(call("pad", (X, [1, 1], "reflect")))
    assert not scaling_operands(call("dropout", (X, 0.5, True)))
    assert not scaling_operands(call("softmax", (X, -1)))
