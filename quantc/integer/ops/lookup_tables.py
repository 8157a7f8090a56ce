"""Lookup tables of unary functions over all integers of a dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quantc.integer.grid import Grid
from quantc.integer.library import OPS, integer_op
from quantc.ir.curves import Curve
from quantc.spec.aten_arithmetic import aten

LOOKED_UP = "out = table[xq], table[q] = clamp(round(f((q − xz) · sx) / so) + zo) in float64"
INDEXABLE = (torch.uint8, torch.int8, torch.int16, torch.uint16)
"""Of these a table has an entry for every value: 256, or 65536."""


@integer_op("lookup(Tensor x, Tensor table, int axis) -> Tensor", formula=LOOKED_UP)
def lookup(x: Tensor, table: Tensor, axis: int) -> Tensor:
    """Lookup table entry of each integer, starting at the lowest one; optionally one table per index of an axis."""
    place = aten.to.dtype(x, torch.int64)
    least = torch.iinfo(x.dtype).min
    if least:
        place = aten.sub.Tensor(place, least)
    if table.dim() == 1:
        return entries(table, place)
    return by_rows(place, axis, table.shape[0], lambda rows: aten.gather.default(table, 1, rows))


def entries(table: Tensor, place: Tensor) -> Tensor:
    """Entries of a one-row table at positions."""
    # on one axis: index_select is some five times as fast as an index of several
    flat = aten.index_select.default(table, 0, aten.reshape.default(place, [-1]))
    found: Tensor = aten.reshape.default(flat, place.shape)
    return found


def by_rows(x: Tensor, axis: int, count: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """`choose` applied to a tensor reshaped to a matrix, with the `count` indices of an axis as rows."""
    turned = aten.transpose.int(x, 0, axis)
    rows = aten.contiguous.default(aten.reshape.default(turned, [count, -1]))
    chosen = aten.reshape.default(choose(rows), turned.shape)
    result: Tensor = aten.contiguous.default(aten.transpose.int(chosen, 0, axis))
    return result


LOOKUP = OPS["lookup"]


def every_integer(dtype: torch.dtype) -> Tensor:
    """All values of an integer dtype, in ascending order, as float64."""
    info = torch.iinfo(dtype)
    return torch.arange(info.min, info.max + 1, dtype=torch.float64)


def curve_levels(curve: Curve, x: Tensor, grid: Grid) -> Tensor:
    """`clamp(round_half_even(f(x) / scale) + zero_point)` of float64 inputs: the quantized results."""
    steps = torch.round(curve.function(x) / grid.scale) + grid.zero_point
    return steps.clamp(grid.qmin, grid.qmax).to(torch.int64)


def table_of(curve: Curve, x: Grid, out: Grid) -> Tensor:
    """Lookup table of a curve from one grid to another; one row per row of the curve."""
    reals = (every_integer(x.dtype) - x.zero_point) * x.scale
    table = curve_levels(curve, reals.expand(curve.rows, -1), out).to(out.dtype)
    return table.reshape(-1) if curve.rows == 1 else table


__all__ = ["INDEXABLE", "LOOKED_UP", "LOOKUP", "by_rows", "entries", "every_integer", "lookup", "table_of"]
