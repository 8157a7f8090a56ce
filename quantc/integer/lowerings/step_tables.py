"""Step tables: an activation of an accumulator, exactly, on integers.

An 8-bit result takes a few hundred values at most and changes at certain accumulator values. The breakpoints and the
levels between them define it completely: no rounding is left for run time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from quantc.integer.grid import Grid
from quantc.integer.library import OPS, integer_op
from quantc.integer.match_lowering import NotIntegerError, Task
from quantc.integer.ops.lookup_tables import by_rows, curve_levels, entries
from quantc.ir.curves import Curve, prelu
from quantc.ir.dialect import argument, curve_of, op_name
from quantc.ir.types import tensor_type
from quantc.spec.aten_arithmetic import aten

LOWEST, HIGHEST = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
STEPPED = "out = levels[number of breakpoints < acc]: clamp(round(f(acc · sx·sw) / so) + zo) for every acc, as a table"


@integer_op("steps(Tensor x, Tensor breakpoints, Tensor levels, int axis) -> Tensor", formula=STEPPED)
def steps(x: Tensor, breakpoints: Tensor, levels: Tensor, axis: int) -> Tensor:
    """The level of the interval between breakpoints that an accumulator falls into.

    With breakpoints of several rows, one row per index of `axis`. `levels[i]` holds for `breakpoints[i - 1] < x <=
    breakpoints[i]`. The lowest int32 is no accumulator: as a breakpoint it lies below every one.
    """

    def level(rows: Tensor) -> Tensor:
        found = aten.searchsorted.Tensor(breakpoints, rows, out_int32=True)
        return entries(levels, found)

    x = aten.to.dtype(x, breakpoints.dtype)
    if breakpoints.dim() == 1:
        return level(aten.contiguous.default(x))
    return by_rows(x, axis, breakpoints.shape[0], level)


@dataclass(frozen=True, eq=False)
class Steps:
    """Constants of the op: breakpoints (int32, sorted; one row per channel), levels, and the channel axis."""

    breakpoints: Tensor
    levels: Tensor
    axis: int


def write_steps(task: Task, accumulator: fx.Node, scale: Tensor, activation: fx.Node, quantizer: fx.Node) -> None:
    """Replace an activation and the quantize op after it by a step table.

    `accumulator` is an int32 node, `scale` its scale in float64: one number, or broadcastable to it. `steps_of` has the
    same refusals and can be called before anything is written.
    """
    table = steps_of(task, scale, activation, quantizer)
    breakpoints, levels = task.keep("breakpoints", table.breakpoints), task.keep("levels", table.levels)
    target = OPS["steps"].target
    made = task.emit(target, accumulator, breakpoints, levels, table.axis, dtype=table.levels.dtype, like=activation)
    task.replace(quantizer, made)


def steps_of(task: Task, scale: Tensor, activation: fx.Node, quantizer: fx.Node) -> Steps:
    """Step table of an activation after an accumulator, on the grid of a quantize op. NotIntegerError if there is none."""
    grid = task.grid(quantizer)
    if grid.qmax - grid.qmin > 255:
        raise NotIntegerError("a result of more than 8 bits has too many steps for a table")
    if not bool((scale > 0).all()):
        raise NotIntegerError("its accumulator is taken times a number that is not positive")
    curve, axis = _curve_on_axis(task, scale, activation)
    breakpoints, levels = step_table(curve, scale.double().reshape(-1), grid)
    if len(breakpoints) == 1:
        breakpoints = breakpoints.reshape(-1)
    return Steps(breakpoints.contiguous(), levels.to(grid.dtype), axis)


def _curve_on_axis(task: Task, scale: Tensor, activation: fx.Node) -> tuple[Curve, int]:
    """The curve of an activation, and the axis of its rows and of the scales, counted from the end."""
    wide = [index - scale.dim() for index, size in enumerate(scale.shape) if size > 1]
    if len(wide) > 1:
        raise NotIntegerError("the scales of its accumulator lie along several axes")
    axis = wide[0] if wide else -1
    if op_name(activation) != "prelu":
        curve = curve_of(activation)
        if curve is None:
            raise NotIntegerError(f"{op_name(activation)} is no function that a table of steps is known for")
        return curve, axis
    slope, kind = task.constant(argument(activation, "w")), tensor_type(activation)
    if slope is None or kind is None:
        raise NotIntegerError(f"the slope of {activation.name} is not a constant")
    if slope.numel() == 1:
        return prelu(slope), axis
    channels = 1 - kind.rank
    if wide and axis != channels:
        raise NotIntegerError("slopes and scales lie along different axes")
    return prelu(slope), channels


# -- making the table --------------------------------------------------------------------------------------------


def step_table(curve: Curve, scale: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Breakpoints (rows, steps) in int32, and levels (steps + 1), of `curve_levels(curve, accumulator * scale, grid)`.

    First, bisection over float64 finds the inputs at which the curve reaches another level; they are the same for all
    scales. Then, for each scale, the integers at which the products reach them.
    """
    farthest = float(scale.max()) * -LOWEST
    reached, levels = _thresholds(curve, grid, farthest)
    last_before = (first_accumulator(reached, scale.reshape(-1, 1)) - 1).clamp(LOWEST, HIGHEST)
    return _compress(last_before.to(torch.int32), levels)


def _thresholds(curve: Curve, grid: Grid, farthest: float) -> tuple[Tensor, Tensor]:
    """Inputs, from left to right, at which a curve reaches another level: per row the smallest input, for all rows the level."""
    begin = torch.full((curve.rows, 1), -farthest, dtype=torch.float64)
    reached, levels = [], []
    for piece in curve.pieces:
        until = torch.as_tensor(piece.until, dtype=torch.float64).expand_as(begin)
        end = until.clamp(max=farthest)
        if bool((begin <= end).any()):
            run = _run(curve, grid, begin, end, piece.rises)
            reached.append(_bisect(curve, grid, begin, end, run, piece.rises))
            levels.append(run)
        begin = torch.maximum(begin, _next_above(until))
    return torch.cat(reached, dim=1), torch.cat(levels)


def _run(curve: Curve, grid: Grid, begin: Tensor, end: Tensor, rises: bool) -> Tensor:
    """The levels that a piece passes through, in their order, in any of the rows that have the piece."""
    here = begin <= end
    ends = torch.cat([curve_levels(curve, begin, grid)[here], curve_levels(curve, end, grid)[here]])
    run = torch.arange(int(ends.min()), int(ends.max()) + 1)
    return run if rises else run.flip(0)


def _bisect(curve: Curve, grid: Grid, begin: Tensor, end: Tensor, run: Tensor, rises: bool) -> Tensor:
    """Smallest inputs between `begin` and `end` at which each level of `run` is reached; beyond the end if none is.

    Neighbouring float64 numbers have neighbouring ranks, so 64 bisections leave one number. Should the curve's own
    rounding make it waver around a level, one of the crossings is found: the level is not reached just before, and is
    reached there.
    """
    low = _rank(begin).expand(-1, len(run)).clone()
    high = torch.maximum(low, _rank(end).expand(-1, len(run)) + 1)
    for _ in range(64):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        levels = curve_levels(curve, _of_rank(middle), grid)
        is_reached = levels >= run if rises else levels <= run
        open_still = low < high
        low = torch.where(open_still & ~is_reached, middle + 1, low)
        high = torch.where(open_still & is_reached, middle, high)
    return _of_rank(low)


def _rank(x: Tensor) -> Tensor:
    """The place of a float64 number among all of them, zero at 0."""
    bits = x.contiguous().view(torch.int64)
    return torch.where(bits < 0, torch.iinfo(torch.int64).min - bits, bits)


def _of_rank(rank: Tensor) -> Tensor:
    bits = torch.where(rank < 0, torch.iinfo(torch.int64).min - rank, rank)
    return bits.view(torch.float64)


def _next_above(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.full_like(x, torch.inf))


def first_accumulator(reached: Tensor, scale: Tensor) -> Tensor:
    """Smallest integers whose product with a scale, rounded to float64, is not below a number."""
    guess = torch.ceil(reached / scale).clamp(LOWEST, HIGHEST + 1)
    guess = torch.where((guess - 1) * scale >= reached, guess - 1, guess)
    guess = torch.where(guess * scale < reached, guess + 1, guess)
    return guess.to(torch.int64)


def _compress(last_before: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The same table without levels that no accumulator of any row has, and without steps from a level to itself.

    `levels[i]` begins after `last_before[:, i]` and ends with the one after it.
    """
    beyond = torch.full_like(last_before[:, :1], HIGHEST)
    starts = torch.cat([torch.full_like(beyond, LOWEST), last_before[:, 1:]], dim=1)
    ends = torch.cat([starts[:, 1:], beyond], dim=1)
    visited = (starts < ends).any(dim=0)
    starts, levels = starts[:, visited], levels[visited]
    changes = torch.cat([torch.tensor([True]), levels[1:] != levels[:-1]])
    return starts[:, changes][:, 1:], levels[changes]


__all__ = ["Steps", "first_accumulator", "step_table", "steps", "steps_of", "write_steps"]
