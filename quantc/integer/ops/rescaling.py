"""Requantization from one grid to another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from quantc.integer.library import OPS, OUT, integer_op
from quantc.spec.aten_arithmetic import center, rescale

REQUANTIZED = "out = clamp(round((xq − xz) · M) + zo); M = sx / so"


@integer_op(f"requantize(Tensor x, int x_zero_point, {OUT}) -> Tensor", formula=REQUANTIZED)
def requantize(x: Tensor, x_zero_point: int, *out: Any) -> Tensor:
    """The same values on another grid."""
    return rescale(center(x, x_zero_point), *out)


REQUANTIZE = OPS["requantize"]
