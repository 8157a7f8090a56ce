"""Accumulator ranges of integer GEMMs and convolutions, and the adjustments that keep them within 32 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quantc.integer.grid import Grid
from quantc.integer.match_lowering import NotIntegerError
from quantc.integer.ops.product_kernels import FLOAT32_FACTOR
from quantc.integer.proof.bounds import (
    FLOAT32_EXACT,
    Layout,
    Reach,
    centered_by_channel,
    exact_in_float32_parts,
    range_reach,
    sum_reach,
)
from quantc.spec.arithmetic import INT32_BITS
from quantc.spec.numerics import BIAS_LIMIT, fit_weight_scale, to_significant_bits
from quantc.spec.spec import FLOAT32_DIGITS


@dataclass(frozen=True, eq=False)
class AccumulatedWeight:
    """The second factor of a conv or matmul: its grid, and its integers if constant."""

    grid: Grid
    levels: Tensor | None
    layout: Layout = "rows"
    groups: int = 1
    """Of a transposed convolution: there the channels of a group have scales, and all groups have the same."""

    def by_output(self, values: Tensor) -> Tensor:
        """Scales or zero points by output channel: one for all, or one each."""
        return values if self.grid.is_whole or self.layout != "transposed" else values.repeat(self.groups)

    def along_axis(self, values: Tensor) -> Tensor:
        """Scales or zero points, shaped to broadcast to the integers."""
        if self.levels is None or self.grid.axis is None:
            return values
        return values.reshape([-1 if dim == self.grid.axis else 1 for dim in range(self.levels.dim())])

    def centered(self) -> Tensor | None:
        """Integers minus zero points by output channel, as in `bounds`; None if only ranges are known."""
        if self.levels is None or (self.layout == "columns" and self.levels.dim() > 2):
            return None
        levels = self.levels.unsqueeze(-1) if self.levels.dim() == 1 else self.levels
        return centered_by_channel(levels, self.by_output(self.grid.zero_point), self.layout, self.groups)


@dataclass(frozen=True)
class Accumulation:
    """Summation plan of an accumulator."""

    parts: int
    """Into how many parts its input channels go, so that each is exact in float32; 0 if none is."""
    largest: int
    """The most that the accumulator can be, its sign aside."""


def accumulation(
    x: Grid, w: AccumulatedWeight, bias: Tensor | None, count: int | None, bits: int = INT32_BITS
) -> Accumulation:
    """Summation plan of two factors; `count` is the number of summands, if known statically.

    NotIntegerError if the accumulator might not fit `bits` bits.
    """
    low, high = centered_range(x)
    weights = w.centered()
    if weights is not None:
        reach = sum_reach(weights, low, high, bias)
        parts = exact_in_float32_parts(weights, low, high)
        farthest = int(weights.abs().max()) if weights.numel() else 0
    elif count is None:
        raise NotIntegerError(
            "how many products are summed is not known before it runs, so its accumulator might overflow"
        )
    else:
        other = centered_range(w.grid)
        reach = _with_bias(range_reach(count, (low, high), other), bias)
        farthest = max(abs(end) for end in other)
        parts = _even_parts(count, max(abs(low), abs(high)) * farthest)
    if reach.bits > bits:
        raise NotIntegerError(f"its accumulator could need {reach.bits} bits, and has {bits}")
    fits_float32 = max(abs(low), abs(high), farthest) <= FLOAT32_FACTOR
    return Accumulation(parts if fits_float32 else 0, max(-reach.lowest, reach.highest))


def centered_range(grid: Grid) -> tuple[int, int]:
    """Range of a grid minus its zero point; the widest, if it has several."""
    return grid.qmin - int(grid.zero_point.max()), grid.qmax - int(grid.zero_point.min())


def _with_bias(reach: Reach, bias: Tensor | None) -> Reach:
    if bias is None:
        return reach
    step = bias.to(torch.int64)
    return Reach(reach.low + step.clamp(max=0), reach.high + step.clamp(min=0))


def _even_parts(count: int, largest: int) -> int:
    """Into how many parts of equal size so many products, each up to a size, go to be exact in float32."""
    size = (FLOAT32_EXACT - 1) // max(largest, 1)
    return max(1, -(-count // size)) if size else 0


def fit_scales(
    w: AccumulatedWeight, bias: Tensor, step: Tensor, digits: int = FLOAT32_DIGITS
) -> tuple[AccumulatedWeight, int]:
    """A weight with scales large enough for the bias, and the number of raised scales. `step` is the scale of x.

    By the rules of numerics: where `|b / (sx·sw)|` exceeds 2^30 the weight's scale is raised until it fits; the
    integers of its channel become smaller. Raised scales have `digits` significant bits.
    """
    scale = w.by_output(w.grid.scale)
    if not bool((bias.double() / (step * scale)).abs().gt(BIAS_LIMIT).any()):
        return w, 0
    if w.levels is None:
        raise NotIntegerError("its bias is more than 2^30 steps of its accumulator")
    raised = fit_weight_scale(bias, step.abs(), scale + torch.zeros_like(bias))
    raised = torch.where(raised > scale, to_significant_bits(raised, digits), raised).double()
    if w.grid.is_whole:
        raised = raised.max()
    elif w.layout == "transposed":
        raised = raised.reshape(w.groups, -1).amax(dim=0)
    grid = replace(w.grid, scale=raised)
    zero_point = w.along_axis(grid.zero_point)
    centered = (w.levels.to(torch.int64) - zero_point).double() * w.along_axis(w.grid.scale / raised)
    levels = (torch.round(centered) + zero_point).clamp(grid.qmin, grid.qmax).to(w.levels.dtype)
    return replace(w, grid=grid, levels=levels), int((raised > w.grid.scale).sum())
