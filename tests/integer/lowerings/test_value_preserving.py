"""Matches that only move the values of one quantized tensor."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.integer.lowerings.value_preserving import Move
from quantc.integer.match_lowering import NotIntegerError, Task
from quantc.ir.types import type_of
from quantc.spec.spec import UINT8
from tests.support.by_hand import aten
from tests.support.moves import backend, fixed, images, integer_form
from tests.support.qdq_by_hand import QdqBuilder, drawn, integers


def test_a_size_that_is_not_known_beforehand_keeps_an_adaptive_pool_in_float() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_max_pool2d(x.relu(), 2)

    shapes = {0: torch.export.Dim("n", min=2), 2: torch.export.Dim("h", min=4)}
    program = qc.capture(Pool().eval(), (images(),), dynamic_shapes=(shapes,))
    integer = integer_form(program, backend(fixed(UINT8, 77), "like x"))
    reasons = list(integer.plan.left_float.rows.values())
    assert reasons == ["the size of axis -2 is not known before it runs"]
    assert integer.coverage().integer_ops == 1  # the relu


# -- step by step --------------------------------------------------------------------------------------------------

X = drawn(2, 4, 6)
GRID = (0.0625, 100)


def move_of(target: Any, *args: Any, after: Any = None, item: int | None = None) -> tuple[Move, QdqBuilder]:
    """A move of a quantized tensor, with an op after it in the match, or one item of its results read."""
    build = QdqBuilder()
    core = build.call(target, build.fake(build.input("x", X), *GRID), *args)
    tail = [] if after is None else [build.call(after, core)]
    yielded = [core, *tail][-1] if item is None else build.call(getitem, core, item)
    program = build.done(build.quantize(yielded, *GRID) if yielded.meta["val"].dtype.is_floating_point else yielded)
    return Move(Task(program, (core, *tail))), build


def test_a_move_knows_its_tensor_and_the_shapes_before_and_after() -> None:
    move, _ = move_of(aten.reshape.default, [8, 6])
    assert move.source.grid.one_scale == GRID[0]
    assert (move.shape, move.result_shape, move.dtype) == ((2, 4, 6), (8, 6), torch.uint8)
    assert [move.size(axis) for axis in (0, -1)] == [2, 6]
    assert not move.is_read_in_float


def test_an_op_that_follows_in_the_match_is_refused() -> None:
    with pytest.raises(NotIntegerError, match="relu follows it in the match"):
        move_of(aten.reshape.default, [8, 6], after=aten.relu.default)


def test_a_tensor_with_scales_for_channels_cannot_be_moved() -> None:
    build = QdqBuilder()
    w = build.by_channel("w", integers(3, 4), torch.ones(3))
    core = build.call(aten.reshape.default, w, [12])
    task = Task(build.done(core), (core,))
    with pytest.raises(NotIntegerError, match="scale for each channel"):
        Move(task)


def test_values_may_be_read_but_not_where_they_were() -> None:
    with pytest.raises(NotIntegerError, match="reads where the values were"):
        move_of(aten.max_pool2d_with_indices.default, [2, 2], item=1)
    move, _ = move_of(aten.max_pool2d_with_indices.default, [2, 2], item=0)
    assert len(move.ends) == 1


def expected(x: Tensor) -> Tensor:
    return (torch.round(x / GRID[0]) + GRID[1]).clamp(0, 255).to(torch.uint8)


def test_the_same_op_on_integers_has_the_same_type_with_integers() -> None:
    move, _ = move_of(aten.flip.default, [1])
    made = move.same()
    assert str(type_of(made)) == "u8[2,4,6]"
    move.finish(made)
    program = move.task.program
    program.touch()
    assert torch.equal(program(X), expected(X).flip(1))
    assert program.plan.lowered[made] == "quantize_per_tensor_1"


def test_an_op_of_several_results_hands_on_the_items_that_are_read() -> None:
    move, _ = move_of(aten.split.Tensor, 2, 1, item=1)
    made = move.same()
    assert str(type_of(made)) == "(u8[2,2,6], u8[2,2,6])"
    move.finish(made)
    move.task.program.touch()
    assert torch.equal(move.task.program(X), expected(X)[:, 2:])


def test_another_op_may_do_it_in_steps_of_any_shape() -> None:
    move, _ = move_of(aten.reshape.default, [8, 6])
    step = move.emit(aten.reshape.default, move.source.node, [48], shape=(48,))
    made = move.same(aten.reshape.default, step, [8, 6])
    move.finish(made, computes=step)
    program = move.task.program
    program.touch()
    assert str(type_of(step)) == "u8[48]"
    assert move.task.made == [step]
    assert torch.equal(program(X), expected(X).reshape(8, 6))
