"""Integers that are handed on: requantized for what quantizes them, dequantized for what reads them in float."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from quantc.integer.lowerings.requantize import ends_of, hand_on, is_read_in_float, requantize
from quantc.integer.match_lowering import Bounds, Quantized, Task
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.spec.spec import INT8, UINT8
from tests.support.by_hand import aten
from tests.support.integer_matches import integer_ops
from tests.support.moves import (
    SCALE,
    backend,
    captured,
    computes_on_integers,
    fixed,
    images,
    integer_form,
    moved,
    real,
    rescaled,
    results,
)
from tests.support.qdq_by_hand import QdqBuilder, drawn


def test_a_move_to_another_grid_is_rescaled_once() -> None:
    other = fixed(INT8, 11, float(np.float32(0.09)))
    x = images()

    def function(x: Tensor) -> Any:
        return x.flip(1), *torch.split(x, [3, 5], 3)

    program = integer_form(captured(function, x), backend(fixed(UINT8, 77), "other", other))
    expected = [rescaled(item, SCALE, other) for item in moved(function, x, UINT8, 77)]
    for found, wanted in zip(results(program, x), expected, strict=True):
        np.testing.assert_array_equal(found, real(wanted, other.scale), strict=True)
    assert computes_on_integers(program, [x])
    assert [row.op for row in program.coverage().rows] == ["flip", "split_sizes"]


# -- step by step --------------------------------------------------------------------------------------------------

X = drawn(2, 6) * 4
OWN, OTHER = (0.0625, 100), (0.125, 7)


def flipped(*grids: tuple[float, int], in_float: bool = False) -> tuple[Task, Quantized, list[fx.Node]]:
    """A flip of a quantized tensor, its integers flipped, and what quantizes the float result."""
    build = QdqBuilder()
    source = build.fake(build.input("x", X), *OWN)
    flip = build.call(aten.flip.default, source, [1])
    ends = [build.quantize(flip, *grid) for grid in grids]
    last = [build.call(aten.tanh.default, flip)] if in_float else []
    task = Task(build.done(*ends, *last), (flip,))
    operand = task.whole(source)
    made = task.emit(aten.flip.default, operand.node, [1], dtype=torch.uint8)
    return task, Quantized(made, operand.grid), ends


def levels(x: Tensor, scale: float, zero_point: int) -> Any:
    return np.clip(np.rint(x.numpy() / scale) + zero_point, 0, 255)


def handed_on(*grids: tuple[float, int], in_float: bool = False) -> tuple[Task, list[Any]]:
    task, made, _ = flipped(*grids, in_float=in_float)
    hand_on(task, task.core, made, task.argument("x"), ends_of(task, task.core))
    task.program.touch()
    found = task.program(X)
    return task, list(found) if isinstance(found, tuple) else [found]


def test_the_ends_are_what_quantizes_with_their_grids() -> None:
    task, _, quantizers = flipped(OWN, OTHER, in_float=True)
    ends = ends_of(task, task.core)
    assert [node for node, _ in ends] == quantizers
    assert [(grid.one_scale, grid.one_zero_point) for _, grid in ends] == [OWN, OTHER]
    assert is_read_in_float(task.core)
    assert not is_read_in_float(flipped(OWN)[0].core)


def test_integers_on_the_same_grid_are_handed_on_as_they_are() -> None:
    task, (found,) = handed_on(OWN)
    assert np.array_equal(found.numpy(), np.flip(levels(X, *OWN), 1))
    assert not integer_ops(task.program)
    assert sum(is_quantize(node) for node in task.program.graph.nodes) == 1  # of the input


def test_integers_for_another_grid_are_requantized() -> None:
    task, (same, other) = handed_on(OWN, OTHER)
    centered = np.flip(levels(X, *OWN), 1) - OWN[1]
    assert np.array_equal(same.numpy(), centered + OWN[1])
    assert np.array_equal(other.numpy(), np.clip(np.rint(centered / 2) + OTHER[1], 0, 255))
    assert len(integer_ops(task.program)) == 1


def test_what_reads_in_float_gets_the_integers_dequantized_without_a_claim() -> None:
    task, (found,) = handed_on(in_float=True)
    expected = (np.flip(levels(X, *OWN), 1) - OWN[1]).astype(np.float32) * np.float32(OWN[0])
    assert torch.equal(found, torch.tanh(torch.from_numpy(expected)))
    (reader,) = [node for node in task.program.graph.nodes if node.target is aten.tanh.default]
    (dequantize,) = reader.all_input_nodes
    assert is_dequantize(dequantize)
    assert dequantize not in task.program.plan.claims


def test_bounds_of_a_clamp_are_those_of_the_rounding() -> None:
    task, made, (quantizer,) = flipped(OTHER)
    node = requantize(task, made, task.grid(quantizer), Bounds(0.0, 1.0))
    task.program.replace(quantizer, node)
    real = (np.flip(levels(X, *OWN), 1) - OWN[1]) / 2
    assert np.array_equal(task.program(X).numpy(), np.clip(np.rint(real) + 7, 7, 15))
