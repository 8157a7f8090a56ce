"""The rows of ops: what they say is held to torch itself."""

from __future__ import annotations

import ast
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from quantc.ir.dialect import (
    BY_NAME,
    FACTORS,
    OPS,
    OVERLOADS,
    RANGES,
    WEIGHTED,
    arguments,
    curve_of,
    ops_in,
    position,
    short_name,
)
from quantc.ir.op_row import MOVES, Family, Op, Trait
from quantc.patterns.op_names import op_target
from tests.support.check_types import source_files
from tests.support.paths import ROOT

X = torch.linspace(-12.0, 12.0, 4001, dtype=torch.float64)


def options(op: Op) -> dict[str, Any]:
    return {name: values[0] for name, values in op.examples.items()}


def called(op: Op) -> fx.Node:
    graph = fx.Graph()
    return graph.call_function(op.target, (graph.placeholder("x"),), options(op))


@pytest.mark.parametrize("op", [op for op in OPS if op.curve], ids=lambda op: op.name)
def test_the_float64_reference_is_what_torch_computes(op: Op) -> None:
    curve = curve_of(called(op))
    assert curve is not None
    expected = op.target(X, **options(op))
    torch.testing.assert_close(curve.function(X.reshape(1, -1)).reshape(-1), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", RANGES)
def test_results_stay_in_their_range_and_reach_its_ends(name: str) -> None:
    low, high = RANGES[name]
    x = torch.cat([X * 5, torch.tensor([-1e3, 1e3])]).reshape(1, -1)
    made = BY_NAME[name].target(x, **options(BY_NAME[name]))
    assert float(made.min()) >= low
    assert float(made.max()) <= high
    assert float(made.min()) - low < 1e-3
    assert high - float(made.max()) < 1e-3


@pytest.mark.parametrize("op", [op for op in OPS if op.examples], ids=lambda op: op.name)
def test_examples_are_of_arguments_and_make_a_call(op: Op) -> None:
    assert {*op.examples} <= {row.name for row in arguments(op.target)[1:]}
    rows = arguments(op.target)
    named = {rows[position(op.target, name)].aten_name: values for name, values in op.examples.items()}
    for name, values in named.items():
        for value in values:
            assert op.target(torch.randn(2, 4), **{**{key: row[0] for key, row in named.items()}, name: value}).numel()


def test_factors_are_operands_and_weights_are_the_second() -> None:
    for name, factors in FACTORS.items():
        assert {*factors} <= {*BY_NAME[name].operands}, name
    assert {*WEIGHTED} == {name for name in FACTORS if "w" in BY_NAME[name].operands}


def test_ops_over_windows_have_as_many_spatial_axes_as_their_names_say() -> None:
    for op in OPS:
        if op.spatial is not None:
            assert f"{op.spatial}d" in op.name


def test_moves_preserve_values_and_activations_are_elementwise() -> None:
    assert all(Trait.PRESERVES_VALUES in BY_NAME[name].traits for name in ops_in(*MOVES))
    assert all(Trait.ELEMENTWISE in BY_NAME[name].traits for name in ops_in(Family.ACTIVATION, Family.MATH))
    assert all(BY_NAME[name].curve is not None for name in ops_in(Family.ACTIVATION))


def test_families_part_the_ops() -> None:
    assert sorted(ops_in(*Family)) == sorted(op.name for op in OPS)
    assert all(ops_in(family) for family in Family)
    assert ops_in(Family.CONV, but=("conv2d",)) == ("conv1d", "conv3d")


def test_overloads_are_other_overloads_of_ops_like_those_of_their_family() -> None:
    for family, names in OVERLOADS.items():
        assert {op_target(name) for name in names}.isdisjoint(op.target for op in OPS)
        assert ops_in(family, overloads=True) == (*ops_in(family), *names)
    assert all(short_name(op_target(name)) == "squeeze" for name in OVERLOADS[Family.VIEW])


# -- how many files name an op -------------------------------------------------------------------------------------------

MAX_FILES = 5
MORE_FILES: dict[str, tuple[int, str]] = {
    "relu": (28, "a bound: products, sums and norms take it into their own ops, ranges go through it"),
    "clamp": (36, "a bound, and the word for bounds: masks, ranges, casts to integers and proofs read it"),
    "sigmoid": (
        10,
        "a gate of recurrent layers, which a pass unrolls; absorbs masks; FX and eager name their rules and results by it",
    ),
    "tanh": (
        15,
        "a gate of recurrent layers, which a pass unrolls and kernels and ONNX name; absorbs masks; an algorithm of gelu",
    ),
    "hardswish": (7, "onednn's linear layers and convolutions do it; torch's kernels, which FX graph mode offers, too"),
    "silu": (7, "onednn's linear layers and convolutions do it; quick gelu is written by it"),
    "leaky_relu": (6, "onednn's linear layers do it; torch's kernels, which FX graph mode offers, too"),
}
"""Activations that more files name than `MAX_FILES`: how many, and why. None is added, and the numbers only fall."""


@cache
def words_of_files() -> tuple[frozenset[str], ...]:
    """By library file, the strings it holds, and the attributes of `aten` it reads, without their overload."""
    apart = ("tests", "benchmarks", "examples")
    paths = [path for path in source_files() if path.relative_to(ROOT).parts[0] not in apart]
    return tuple(frozenset(words(ast.parse(path.read_text(encoding="utf-8")))) for path in paths)


def words(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value.removeprefix("aten.").partition(".")[0].removesuffix("_"))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] == "aten":
            found.add(node.attr.removesuffix("_"))
    return found


@pytest.mark.parametrize("name", ops_in(Family.ACTIVATION))
def test_few_files_name_an_activation(name: str) -> None:
    count = sum(name in found for found in words_of_files())
    assert count > 0
    most = MORE_FILES[name][0] if name in MORE_FILES else MAX_FILES
    assert count <= most, f"{name}: more than {most} files; make its lists queries by family"
    assert name not in MORE_FILES or count == most > MAX_FILES, (
        f"{name}: {count} files, so lower its number, or drop it"
    )


def test_words_are_strings_and_overloads_however_they_are_spelled() -> None:
    tree = ast.parse("a = 'elu'; b = 'aten.selu_.default'; c = torch.ops.aten.celu_.default; d = aten.gelu; e = mish")
    assert words(tree) == {"elu", "selu", "celu", "gelu"}
