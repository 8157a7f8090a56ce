"""The ends of matches: one op that rounds once onto each grid of the result, or yields float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quantc.integer.epilogue import ACCUMULATOR_LIMIT, Term, finish, finish_sum, reach, term
from quantc.integer.grid import Grid
from quantc.integer.match_lowering import NotIntegerError, Task
from quantc.integer.ops.rescaling import REQUANTIZE
from quantc.ir.program import Program
from quantc.qdq.ops import is_quantize
from quantc.spec.arithmetic import Arithmetic, MultiplierForm
from tests.support.by_hand import aten
from tests.support.integer_matches import integer_ops
from tests.support.qdq_by_hand import BYTES, SIGNED, Ends, QdqBuilder, drawn

X, Y = drawn(4, 5) * 3, drawn(4, 5, seed=1) * 3
X_GRID, Y_GRID = (0.0625, 100), (0.03125, 7)
FORMS: tuple[MultiplierForm, ...] = ("float64", "fixed")
both_forms = pytest.mark.parametrize("form", FORMS)


def added(*grids: tuple[float, int, Ends], tail: Callable[..., Any] | None = None, in_float: bool = False) -> Task:
    """x + y, an op after it, and grids that its result is quantized on."""
    build = QdqBuilder()
    x, y = build.input("x", X), build.input("y", Y)
    core = build.call(aten.add.Tensor, build.fake(x, *X_GRID), build.fake(y, *Y_GRID))
    nodes = [core] if tail is None else [core, build.call(tail, core)]
    ends = [build.quantize(nodes[-1], *grid) for grid in grids]
    return Task(build.done(*ends, *([nodes[-1]] if in_float else [])), tuple(nodes))


def levels(x: Tensor, scale: float, zero_point: int) -> Any:
    """Integers less their zero point; the scales here are powers of two, so that nothing is lost."""
    return np.clip(np.rint(x.numpy() / np.float32(scale)) + zero_point, 0, 255).astype(np.int64) - zero_point


def total() -> Any:
    return levels(X, *X_GRID) * X_GRID[0] + levels(Y, *Y_GRID) * Y_GRID[0]


def onto(real: Any, scale: float, zero_point: int, ends: Ends) -> Any:
    return np.clip(np.rint(real / np.float64(np.float32(scale))) + zero_point, *ends[:2])


def sum_of(task: Task, offset: Tensor | None = None, sign: float = 1.0) -> Program:
    x, y = (task.whole(task.argument(name)) for name in "xy")
    finish_sum(task, [term(x), term(y, sign)], offset)
    task.program.touch()
    return task.program


def result(program: Program) -> list[Any]:
    found = program(X, Y)
    return [part.numpy() for part in (found if isinstance(found, tuple) else (found,))]


@both_forms
def test_a_sum_is_rounded_once_onto_every_grid_that_reads_it(form: MultiplierForm) -> None:
    grids = [(0.11, 128, BYTES), (0.09, -5, SIGNED)]
    task = added(*grids)
    task.arithmetic = Arithmetic(multiplier=form)
    program = sum_of(task)
    assert len(integer_ops(program)) == 2
    assert sum(is_quantize(node) for node in program.graph.nodes) == 2  # those of the inputs
    for found, grid in zip(result(program), grids, strict=True):
        assert np.array_equal(found, onto(total(), *grid))


@both_forms
def test_signs_and_an_offset_are_part_of_the_sum(form: MultiplierForm) -> None:
    task = added((0.11, 128, BYTES))
    task.arithmetic = Arithmetic(multiplier=form)
    program = sum_of(task, torch.tensor(1.5).double(), sign=-1.0)
    real = levels(X, *X_GRID) * X_GRID[0] - levels(Y, *Y_GRID) * Y_GRID[0] + 1.5
    assert np.array_equal(result(program)[0], onto(real, 0.11, 128, BYTES))


def test_a_tail_that_clamps_becomes_the_bounds_of_the_rounding() -> None:
    program = sum_of(added((0.11, 128, BYTES), tail=aten.relu.default))
    assert aten.relu.default not in [node.target for node in program.graph.nodes if node.users]
    assert np.array_equal(result(program)[0], onto(np.maximum(total(), 0), 0.11, 128, BYTES))


@pytest.mark.parametrize(("tail", "in_float"), [(aten.tanh.default, False), (aten.relu.default, True)])
def test_a_tail_that_does_more_and_a_result_read_in_float_stay(tail: Callable[..., Any], in_float: bool) -> None:
    task = added((0.11, 128, BYTES), tail=tail, in_float=in_float)
    program = sum_of(task)
    (made,) = integer_ops(program)
    assert {user.target for user in made.users} == {tail}
    expected = torch.from_numpy(total().astype(np.float32))
    assert np.array_equal(result(program)[0], onto(tail(expected).numpy(), 0.11, 128, BYTES))


def rescaled(task: Task, scale: float, divisor: Tensor | None = None, largest: int = ACCUMULATOR_LIMIT) -> Any:
    x = task.whole(task.argument("x"))
    head = (x.node, x.grid.one_zero_point)
    finish(task, REQUANTIZE.target, head, torch.tensor(scale).double(), divisor=divisor, largest=largest)
    task.program.touch()
    return result(task.program)[0]


@both_forms
@pytest.mark.parametrize("divisor", [None, 3])
def test_an_accumulator_is_rescaled_and_divided(form: MultiplierForm, divisor: int | None) -> None:
    task = added((0.11, 128, BYTES))
    task.arithmetic = Arithmetic(multiplier=form)
    found = rescaled(task, 0.25, None if divisor is None else torch.tensor(divisor))
    assert np.array_equal(found, onto(levels(X, *X_GRID) * 0.25 / (divisor or 1), 0.11, 128, BYTES))


def test_multipliers_that_no_mantissa_holds_are_refused() -> None:
    task = added((2.0**-60, 128, BYTES))
    task.arithmetic = Arithmetic(multiplier="fixed")
    with pytest.raises(NotIntegerError, match="too large for sums of 64 bits"):
        sum_of(task)


@pytest.mark.parametrize(("zero_point", "farthest"), [(0, 255), (255, 255), (100, 155), (200, 200)])
def test_the_reach_of_a_grid_is_its_farthest_level(zero_point: int, farthest: int) -> None:
    assert reach(Grid(torch.ones(()), torch.tensor(zero_point), 0, 255, torch.uint8)) == farthest


def test_a_term_is_an_operand_with_its_scale_and_reach() -> None:
    task = added((0.11, 128, BYTES))
    found = term(task.whole(task.argument("x")), -2.0)
    assert isinstance(found, Term)
    assert (found.zero_point, found.largest, float(found.scale)) == (100, 155, -0.125)
