"""Elementwise integer ops: sums across grids, and products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.integer.library import ENDING, OPS, OUT, integer_op
from quantc.spec.arithmetic import Rounding
from quantc.spec.aten_arithmetic import aten, center, rescale, round_to_grid

SUMMED = "out = clamp(round(Σ_i (x_i − z_i) · M_i + offset) + zo); M_i = s_i / so"
MULTIPLIED = "out = clamp(round((xq − xz)(yq − yz) · M) + zo); M = sx·sy / so"


def _sum_fast(
    xs: Sequence[Tensor],
    zero_points: Sequence[int],
    multipliers: Sequence[Tensor],
    offset: Tensor | None,
    shift: Tensor | None,
    out_zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    rounding: Rounding = "half-even",
    saturate: bool = True,
) -> Tensor:
    """`summed` with fewer copies: the same operations in the same order, in place where shapes allow it."""
    if shift is not None or rounding != "half-even" or not saturate:
        grid = (out_zero_point, qmin, qmax, dtype, rounding, saturate)
        exact: Tensor = sum_tensors(xs, zero_points, multipliers, offset, shift, *grid)
        return exact
    total = _scale(xs[0], zero_points[0], multipliers[0])
    for x, zero_point, multiplier in zip(xs[1:], zero_points[1:], multipliers[1:], strict=True):
        total = _onto(total, _scale(x, zero_point, multiplier), torch.add)
    if offset is not None:
        total = _onto(total, offset, torch.add)
    if dtype.is_floating_point:
        return total.to(dtype)
    return total.round_().add_(out_zero_point).clamp_(qmin, qmax).to(dtype)


def _scale(x: Tensor, zero_point: int, multiplier: Tensor) -> Tensor:
    wide = x.to(torch.float64)
    if zero_point:
        wide.sub_(zero_point)
    return _onto(wide, multiplier, torch.mul)


def _onto(target: Tensor, other: Tensor, op: Any) -> Tensor:
    """`op(target, other)`, written over `target` if the result has its shape."""
    whole: tuple[int, ...] = torch.broadcast_shapes(target.shape, other.shape)  # type: ignore[no-untyped-call]
    result: Tensor = op(target, other, out=target) if whole == target.shape else op(target, other)
    return result


@integer_op(
    "sum(Tensor[] xs, int[] zero_points, Tensor[] multipliers, Tensor? offset, Tensor? shift, int out_zero_point, "
    f"int qmin, int qmax, ScalarType dtype, {ENDING}) -> Tensor",
    formula=SUMMED,
    kernel=_sum_fast,
)
def sum_tensors(
    xs: Sequence[Tensor],
    zero_points: Sequence[int],
    multipliers: Sequence[Tensor],
    offset: Tensor | None,
    shift: Tensor | None,
    out_zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    rounding: Rounding = "half-even",
    saturate: bool = True,
) -> Tensor:
    """Sum of tensors with different grids, added in order in float64 and rounded once.

    With `shift` the multipliers are mantissas and the offset an int64, all times `2^-shift`, and the sum is formed and
    rounded in 64-bit integers. If `dtype` is float32 the result is the unrounded sum: the integer region ends there.
    """
    wide = torch.float64 if shift is None else torch.int64
    total: Tensor = _product(center(xs[0], zero_points[0]), multipliers[0], wide)
    for x, zero_point, multiplier in zip(xs[1:], zero_points[1:], multipliers[1:], strict=True):
        total = aten.add.Tensor(total, _product(center(x, zero_point), multiplier, wide))
    if offset is not None:
        total = aten.add.Tensor(total, offset)
    return round_to_grid(total, shift, out_zero_point, qmin, qmax, dtype, rounding, saturate)


SUM = OPS["sum"]


def _product(x: Tensor, multiplier: Tensor, dtype: torch.dtype) -> Tensor:
    product: Tensor = aten.mul.Tensor(aten.to.dtype(x, dtype), aten.to.dtype(multiplier, dtype))
    return product


NARROW = (torch.int8, torch.uint8)


@integer_op(
    f"mul(Tensor x, int x_zero_point, Tensor y, int y_zero_point, {OUT}) -> Tensor",
    formula=MULTIPLIED,
)
def mul(x: Tensor, x_zero_point: int, y: Tensor, y_zero_point: int, *out: Any) -> Tensor:
    """Elementwise product of two tensors. Its accumulator is int32; int64 where an operand has 16 bits."""
    wide = torch.int32 if x.dtype in NARROW and y.dtype in NARROW else torch.int64
    return rescale(aten.mul.Tensor(center(x, x_zero_point, wide), center(y, y_zero_point, wide)), *out)


MUL = OPS["mul"]
