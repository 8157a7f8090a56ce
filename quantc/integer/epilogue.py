"""Epilogue emission: requantizes the result of a match onto its output grids, or yields float."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantc.integer.fixed_point import common_shift
from quantc.integer.grid import Grid
from quantc.integer.match_lowering import Bounds, NotIntegerError, Quantized, Task, tail_bounds
from quantc.integer.ops.elementwise import SUM

ACCUMULATOR_LIMIT = 2**31
"""The most that an int32 accumulator can be."""


@dataclass(frozen=True, eq=False)
class Term:
    """A summand: `(node - zero_point) * scale`."""

    node: fx.Node
    zero_point: int
    scale: Tensor
    """float64; of a shape that goes with the node's."""
    largest: int = ACCUMULATOR_LIMIT
    """The most that |node - zero_point| can be."""


def term(x: Quantized, factor: float = 1.0) -> Term:
    """A quantized operand, times a number, as a summand."""
    return Term(x.node, x.grid.one_zero_point, x.grid.scale * factor, reach(x.grid))


def reach(grid: Grid) -> int:
    """Maximum of |q - zero_point|."""
    return max(grid.qmax - grid.one_zero_point, grid.one_zero_point - grid.qmin)


@dataclass(frozen=True, eq=False)
class OutputGrid:
    """Output grid and clamp bounds of a result."""

    grid: Grid
    bounds: Bounds


Make = Callable[[OutputGrid | None], tuple[Any, ...]]
"""The arguments of the op that yields a result in a place, or in float."""


def end(task: Task, target: Any, make: Make, of: fx.Node | None = None) -> None:
    """Replace `of`, a node of the match (its core by default), and its tail by one op.

    A tail that only clamps becomes the bounds of the rounding. If the tail does more, or the result is read in float,
    the op yields float and the tail stays.
    """
    node = task.core if of is None else of
    bounds, quantizers = tail_bounds(task.nodes[task.nodes.index(node) + 1 :]), task.quantizers()
    if bounds is None or not quantizers:
        made = task.emit(target, *make(None), dtype=torch.float32, like=node)
        task.replace(node, made)
        return
    grids = [task.grid(quantizer) for quantizer in quantizers]
    results = [task.emit(target, *make(OutputGrid(grid, bounds)), dtype=grid.dtype) for grid in grids]
    for quantizer, result in zip(quantizers, results, strict=True):
        task.replace(quantizer, result)


def finish(
    task: Task,
    target: Any,
    head: tuple[Any, ...],
    scale: Tensor,
    of: fx.Node | None = None,
    divisor: Tensor | None = None,
    largest: int = ACCUMULATOR_LIMIT,
) -> None:
    """Finish with an op that rescales its accumulator, which is at most `largest`.

    `scale` is the accumulator's, and `divisor` the integer that it is divided by, if any; both broadcast to it. The
    multiplier is `scale / so`, or `scale / (so * divisor)`, where the product is exact.
    """
    count = torch.ones((), dtype=torch.float64) if divisor is None else divisor.double()

    def make(place: OutputGrid | None) -> tuple[Any, ...]:
        if place is None:
            return (*head, *task.to_float(scale / count))
        multiplier, grid = scale / (place.grid.scale * count), place.grid
        if task.arithmetic.multiplier != "fixed" or largest <= ACCUMULATOR_LIMIT:
            return (*head, *task.onto(grid, multiplier, place.bounds))
        # times a mantissa of 31 bits, an accumulator this wide could leave an int64
        (mantissa,), _, shift = _in_fixed(task, [largest], [multiplier], None)
        return (
            *head,
            mantissa,
            shift,
            grid.one_zero_point,
            *place.bounds.on(grid),
            grid.dtype,
            *task.arithmetic.ending,
        )

    end(task, target, make, of)


def finish_sum(task: Task, terms: Sequence[Term], offset: Tensor | None = None, of: fx.Node | None = None) -> None:
    """Finish with a sum of terms, in their order, and a real `offset` (float64)."""
    nodes, zero_points = [item.node for item in terms], [item.zero_point for item in terms]

    def make(place: OutputGrid | None) -> tuple[Any, ...]:
        if place is None:
            numbers = _in_float64(task, [item.scale for item in terms], offset)
            return (nodes, zero_points, *numbers, 0, 0, 0, torch.float32)
        grid = place.grid
        low, high = place.bounds.on(grid)
        scaled = [item.scale / grid.scale for item in terms]
        constant = None if offset is None else offset / grid.scale
        task.check_shifts(*scaled)
        if task.arithmetic.multiplier == "float64":
            numbers = _in_float64(task, scaled, constant)
        else:
            numbers = _in_fixed(task, [item.largest for item in terms], scaled, constant)
        return (nodes, zero_points, *numbers, grid.one_zero_point, low, high, grid.dtype, *task.arithmetic.ending)

    end(task, SUM.target, make, of)


def _in_float64(task: Task, multipliers: Sequence[Tensor], offset: Tensor | None) -> tuple[Any, ...]:
    """Multipliers, offset and shift as constants."""
    kept = [task.keep("multiplier", item.double()) for item in multipliers]
    return kept, None if offset is None else task.keep("offset", offset.double()), None


def _in_fixed(
    task: Task, largest: Sequence[int], multipliers: Sequence[Tensor], offset: Tensor | None
) -> tuple[Any, ...]:
    """The same with mantissas, on one shift."""
    found = common_shift(multipliers, largest, offset, least=task.arithmetic.multiplier == "shift")
    if found is None:
        raise NotIntegerError("its multipliers are too large for sums of 64 bits")
    mantissas, constant, shift = found
    if task.arithmetic.multiplier == "shift":  # the target adds operands that are shifted to the finest scale
        _check_shifted(task, largest, mantissas, constant)
    kept = [task.keep("mantissa", item) for item in mantissas]
    return kept, None if constant is None else task.keep("offset", constant), task.keep("shift", shift)


def _check_shifted(task: Task, largest: Sequence[int], mantissas: Sequence[Tensor], offset: Tensor | None) -> None:
    """Refuse a sum of shifted operands that could leave the accumulator."""
    terms = [item.abs() * most for item, most in zip(mantissas, largest, strict=True)]
    total = sum(terms, torch.zeros((), dtype=torch.int64) if offset is None else offset.abs())
    most, bits = int(total.max()), task.arithmetic.sum_bits
    if most >= 2 ** (bits - 1):
        raise NotIntegerError(f"its accumulator could need {most.bit_length() + 1} bits, and has {bits}")
