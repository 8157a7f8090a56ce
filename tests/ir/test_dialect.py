"""The dialect's table of ops: names, arguments, and traits that hold when torch runs the op."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from quantc.ir.dialect import (
    BY_NAME,
    BY_TARGET,
    DROPOUTS,
    OPS,
    argument,
    arguments,
    is_op,
    is_opaque,
    may_alias,
    op_name,
    operands,
    overload_names,
    position,
    short_name,
    target_name,
    traits_of,
    writes,
)
from quantc.ir.op_row import Op, Trait

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call in a graph of its own; every "x" among the arguments is an input of that graph."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, tuple(x if arg == "x" else arg for arg in args), kwargs)


def with_trait(trait: Trait) -> list[Op]:
    return [op for op in OPS if trait in op.traits]


def names(ops: list[Op]) -> list[str]:
    return [op.name for op in ops]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_op_has_a_name_and_an_overload_of_its_own() -> None:
    assert len(BY_NAME) == len(BY_TARGET) == len(OPS)
    for op in OPS:
        rows = arguments(op.target)
        assert [row.name for row in rows[: len(op.operands)]] == list(op.operands)
        assert len({row.name for row in rows}) == len(rows), "an operand has the name of another argument"


@pytest.mark.parametrize("op", with_trait(Trait.COMMUTES), ids=lambda op: op.name)
def test_operands_of_commuting_ops_may_be_swapped(op: Op) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(20), torch.randn(20)
    assert torch.equal(op.target(x, y), op.target(y, x))


UNARY = [op for op in with_trait(Trait.ELEMENTWISE) if op.operands == ("x",)]


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name)
def test_elements_of_elementwise_ops_depend_on_their_own_element(op: Op) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 6) + 0.1
    changed = x.clone()
    changed[1, 3] = 0.05
    differs = op.target(x) != op.target(changed)
    others = torch.ones_like(differs)
    others[1, 3] = False
    assert not (differs & others).any()


MOVES: dict[str, tuple[Any, ...]] = {
    "max_pool2d": ([2, 2], [2, 2], [1, 1]),
    "reshape": ([6, 16],),
    "flatten": (1,),
    "unflatten": (1, [1, 3]),
    "permute": ([3, 1, 0, 2],),
    "transpose": (0, 1),
    "expand": ([-1, -1, -1, -1],),
    "repeat": ([1, 2, 1, 1],),
    "select": (1, 2),
    "slice": (1, 1),
    "narrow": (3, 1, 2),
    "flip": ([0],),
    "roll": ([1], [3]),
    "pad": ([1, 1],),
    "upsample_nearest2d": (None, [2.0, 2.0]),
    "pixel_unshuffle": (2,),
}


@pytest.mark.parametrize("name", MOVES)
def test_ops_that_preserve_values_compute_no_new_ones(name: str) -> None:
    assert Trait.PRESERVES_VALUES in BY_NAME[name].traits
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 4) - 5
    result = BY_NAME[name].target(x, *MOVES[name])
    assert set(result.flatten().tolist()) <= {*x.flatten().tolist(), 0.0}


def test_every_dropout_depends_on_the_mode() -> None:
    assert set(DROPOUTS) <= set(names(with_trait(Trait.MODAL)))
    x = torch.ones(4, 8, 8)
    for name in DROPOUTS:
        torch.manual_seed(0)
        assert not torch.equal(BY_NAME[name].target(x, 0.5, True), x)
        assert torch.equal(BY_NAME[name].target(x, 0.5, False), x)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_are_read_by_either_name_with_defaults_filled_in() -> None:
    node = call(aten.conv2d.default, "x", "w", padding=[1, 1])
    assert (argument(node, "w"), argument(node, "weight"), argument(node, "b")) == ("w", "w", None)
    assert (argument(node, "padding"), argument(node, "stride"), argument(node, "groups")) == ([1, 1], [1, 1], 1)


def test_a_number_stands_for_as_many_as_the_op_has_dimensions() -> None:
    widths = {n: arguments(getattr(aten, f"conv{n}d").default)[3] for n in (1, 2, 3)}
    assert [(row.name, row.width, row.default) for row in widths.values()] == [
        ("stride", 1, [1]),
        ("stride", 2, [1, 1]),
        ("stride", 3, [1, 1, 1]),
    ]


def test_memory_formats_are_torchs_and_not_numbers() -> None:
    node = call(aten.contiguous.default, "x")
    assert argument(node, "memory_format") is torch.contiguous_format


def test_arguments_that_an_op_does_not_have_are_refused() -> None:
    with pytest.raises(KeyError, match="relu has no argument 'alpha'"):
        argument(call(aten.relu.default, "x"), "alpha")
    with pytest.raises(KeyError, match="argument 'x'"):
        argument(call(torch.relu, "x"), "x")
    assert position(aten.relu.default, "alpha") == -1
    assert position(aten.addmm.default, "b") == 0
    assert position(aten.addmm.default, "mat2") == 2


def test_operands_are_listed_under_their_dialect_names() -> None:
    linear = call(aten.linear.default, "x", "w", bias="bias")
    assert [name for name, _ in operands(linear)] == ["x", "w", "b"]
    assert [name for name, _ in operands(call(torch.relu, "x", 3, key=4))] == ["0", "1", "key"]


# -- names -------------------------------------------------------------------------------------------------------------


def test_targets_have_short_full_or_qualified_names() -> None:
    assert target_name(aten.mean.dim) == "mean"
    assert target_name(aten.cumsum.default) == "aten.cumsum.default"
    assert target_name(torch.ops.higher_order.cond) == "higher_order.cond"
    assert target_name(operator.getitem) == "operator:getitem"
    assert short_name(aten.relu_.default) == short_name(aten.relu.default) == "relu"
    assert op_name(call(aten.relu.default, "x")) == "relu"
    assert op_name(fx.Graph().placeholder("x")) == "placeholder"
    assert {"Tensor", "out"} <= set(overload_names(aten.add))


def test_a_call_is_the_op_of_its_overload_alone() -> None:
    assert is_op(call(aten.add.Tensor, "x", 1), "sub", "add")
    assert not is_op(call(aten.add.Scalar, "x", 1), "add")
    assert not is_op(call(aten.add.Tensor, "x", 1), "sub")
    assert not is_op("add", "add")
    assert Trait.COMMUTES in traits_of(call(aten.mul.Tensor, "x", 1))
    assert traits_of(call(torch.mul, "x", 1)) == frozenset()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_writes_are_the_arguments_whose_memory_changes() -> None:
    assert writes(aten.relu.default) == ()
    assert writes(aten.relu_.default) == (0,)
    assert [arguments(aten.add.out)[index].aten_name for index in writes(aten.add.out)] == ["out"]
    assert len(writes(aten.max.dim_max)) == 2
    assert writes(torch.relu_) == ()


SHARING: dict[Any, Callable[[Tensor], tuple[Any, ...]]] = {
    aten.view.default: lambda x: (x, [4]),
    aten.reshape.default: lambda x: (x, [4]),
    aten.contiguous.default: lambda x: (x,),
    aten.dropout.default: lambda x: (x, 0.5, False),
    aten.alpha_dropout.default: lambda x: (x, 0.5, False),
    aten.einsum.default: lambda x: ("ij->ji", [x]),
    aten.type_as.default: lambda x: (x, torch.ones(1)),
    aten.atleast_1d.default: lambda x: (x,),
    aten.conj_physical.default: lambda x: (x,),
    aten._unsafe_view.default: lambda x: (x, [4]),
    aten.to.dtype: lambda x: (x, torch.float32),
    aten.relu_.default: lambda x: (x,),
}


@pytest.mark.parametrize("target", SHARING, ids=str)
def test_results_that_share_memory_with_an_operand_are_said_to(target: Any) -> None:
    x = torch.ones(2, 2)
    assert target(*SHARING[target](x)).data_ptr() == x.data_ptr(), "torch no longer shares it: the case is of no use"
    assert may_alias(target)


def test_results_of_ops_that_compute_are_new_and_those_of_unknown_calls_may_not_be() -> None:
    assert not may_alias(aten.relu.default)
    assert not may_alias(aten.clone.default)
    assert not may_alias(operator.add)
    assert may_alias(operator.getitem)
    assert may_alias(torch.relu)


def test_what_no_pattern_can_match_is_opaque() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    assert is_opaque(graph.call_module("layer", (x,)))
    assert is_opaque(graph.call_method("relu", (x,)))
    assert not is_opaque(x)
    opaque = {target: is_opaque(call(target, "x")) for target in (torch.relu, aten.relu_.default, aten.cumsum.default)}
    assert list(opaque.values()) == [True, True, False]
    assert not is_opaque(call(operator.getitem, "x", 0))
    assert not is_opaque(call(operator.mul, "x", 2))
    assert is_opaque(call(torch.ops.quantized.relu6.default, "x"))
    assert not is_opaque(call(torch.ops.higher_order.cond, "x"))
