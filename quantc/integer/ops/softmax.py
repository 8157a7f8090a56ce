"""Integer softmax: a lookup table of exponentials, a sum, a division."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantc.integer.grid import Grid
from quantc.integer.library import OPS, integer_op
from quantc.integer.ops.lookup_tables import entries
from quantc.spec.aten_arithmetic import aten, round_to_grid

SOFTMAX = (
    "e = table[max xq − xq], table[d] = round(exp(−sx·d) · 2^p); out = clamp(round(e · M / Σ e) + zo); M = 1 / so; "
    "p = min(52, 62 − ⌈log2 n⌉, 61 − ⌈log2 M⌉) for n summands"
)
SOFTMAX_DEVIATION = (
    "(n + 1) · 2^-p / so steps; with multiplier='fixed', and so not a power of two, p is at most 31 and 2^-24 is added"
)
EXACT_PLACES = 52
"""More places a power in float64 does not have."""
ROOM = 62
"""Sums and products stay below two to this."""
UNKNOWN_LENGTH = 2**22
"""An axis whose length is not known beforehand is taken to have at most so many elements."""


def _softmax_fast(
    x: Tensor,
    table: Tensor,
    dim: int,
    multiplier: Tensor,
    shift: Tensor | None,
    out_zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    """`softmax` with a division in float64. If one lies so near to a half that this could round another way, the
    reference decides."""
    out = (out_zero_point, qmin, qmax, dtype)
    if shift is not None and x.numel():
        factor = math.ldexp(float(multiplier), -int(shift))
        wide = x.to(torch.int32)
        powers = entries(table.to(torch.float64), wide.amax(dim, keepdim=True) - wide)
        parts = powers.div_(powers.sum(dim, keepdim=True)).mul_(factor)
        levels = parts.round()
        nearest_half = 0.5 - float(parts.sub_(levels).abs_().max())
        # each of the sum's additions is off by 2^-53 at most, and so are the division and the product
        length = x.shape[dim] if x.dim() else 1
        if nearest_half > factor * (length + 4) * 2.0**-52:
            return levels.add_(out_zero_point).clamp_(qmin, qmax).to(dtype)
    exact: Tensor = softmax(x, table, dim, multiplier, shift, *out)
    return exact


@integer_op(
    "softmax(Tensor x, Tensor table, int dim, Tensor multiplier, Tensor? shift, int out_zero_point, int qmin, "
    "int qmax, ScalarType dtype) -> Tensor",
    formula=SOFTMAX,
    deviation=SOFTMAX_DEVIATION,
    kernel=_softmax_fast,
)
def softmax(
    x: Tensor,
    table: Tensor,
    dim: int,
    multiplier: Tensor,
    shift: Tensor | None,
    out_zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    """Exponentials of the distances to the maximum, from a lookup table, each divided by their sum.

    With `shift`, of one bit or more, the multiplier is an integer times `2^-shift` and the division is an integer one.
    """
    wide = aten.to.dtype(x, torch.int32)
    below = aten.sub.Tensor(aten.amax.default(wide, [dim], True), wide)
    powers = entries(table, below)
    total = aten.sum.dim_IntList(powers, [dim], True)
    if shift is None:
        scaled = aten.mul.Tensor(aten.to.dtype(powers, torch.float64), multiplier)
        parts = aten.div.Tensor(scaled, aten.to.dtype(total, torch.float64))
        return round_to_grid(parts, None, out_zero_point, qmin, qmax, dtype)
    scaled = aten.mul.Tensor(powers, aten.to.dtype(multiplier, torch.int64))
    quotient = aten.div.Tensor_mode(scaled, total, rounding_mode="floor")
    is_more = aten.ne.Tensor(scaled, aten.mul.Tensor(quotient, total))
    # one more place says whether anything was left: so a half that has a rest is no tie
    places = aten.add.Tensor(aten.mul.Tensor(quotient, 2), aten.to.dtype(is_more, torch.int64))
    return round_to_grid(places, aten.add.Tensor(shift, 1), out_zero_point, qmin, qmax, dtype)


SOFTMAX_OP = OPS["softmax"]


def powers_of(x: Grid, length: int | None, multiplier_bits: int) -> Tensor:
    """`exp(-scale * d)` for every distance of two integers of a grid, in int64 with as many fractional bits as fit:
    `length` of them are summed, and one is multiplied by an integer of `multiplier_bits`.
    """
    summands = math.ceil(math.log2(max(length or UNKNOWN_LENGTH, 1)))
    places = min(EXACT_PLACES, ROOM - summands, ROOM - multiplier_bits)
    info = torch.iinfo(x.dtype)
    distances = torch.arange(info.max - info.min + 1, dtype=torch.float64)
    return torch.round(torch.exp(-x.scale * distances) * 2.0**places).to(torch.int64)


__all__ = ["SOFTMAX", "SOFTMAX_DEVIATION", "SOFTMAX_OP", "powers_of", "softmax"]
