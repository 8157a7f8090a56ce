"""Positive homogeneity of ops: which operands may be multiplied by a positive number, so that the result is."""

from __future__ import annotations

import math

import torch
from torch import fx

from quantc.ir.curves import Curve
from quantc.ir.dialect import argument, curve_of, is_op, row_of
from quantc.ir.op_row import Family, Trait

PROBES = torch.cat([sign * torch.exp2(torch.arange(-40.0, 41.0, dtype=torch.float64)) for sign in (-1, 1)])
"""Numbers over 24 decades: a function that is a line on either side of 0 is one on all of them."""


def scaling_operands(node: fx.Node) -> tuple[tuple[str, ...], ...]:
    """Sets of operands by name: multiplying all of one set by a positive number multiplies the result by it. Empty if
    nothing is known of the op."""
    row = row_of(node)
    if row is None:
        return ()
    if row.family is Family.DROPOUT:
        return row.scales if argument(node, "train") is False else ()
    if is_op(node, "pad"):
        return (("x",),) if argument(node, "mode") != "constant" or not argument(node, "value") else ()
    if row.scales:
        return row.scales
    if Trait.PRESERVES_VALUES in row.traits:
        return ((row.operands[0],),)
    curve = curve_of(node)
    return ((row.operands[0],),) if curve is not None and is_homogeneous(curve) else ()


def upper_bound(node: fx.Node) -> float | None:
    """The number up to which an op with an upper bound passes a factor on: 6 for relu6. None if there is no such number."""
    if not is_op(node, "clamp"):
        return None
    low, high = argument(node, "min"), argument(node, "max")
    if not isinstance(high, int | float) or not 0 < high < math.inf or not (low is None or scales_too(float(low))):
        return None
    return float(high)


def is_homogeneous(curve: Curve) -> bool:
    """True if a function of one number is a line through 0 on either side of it."""
    found = curve.function(PROBES.expand(curve.rows, -1) if curve.rows > 1 else PROBES)
    slopes = (found / PROBES).reshape(-1, 2, PROBES.numel() // 2)
    return bool((slopes == slopes[..., :1]).all())


def scales_too(number: float) -> bool:
    """True for 0 and infinity, which any factor leaves alone."""
    return number == 0 or math.isinf(number)
