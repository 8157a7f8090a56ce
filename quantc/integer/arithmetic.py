"""The pieces every reference is made of, in ATen primitives: they run on tensors, and on proxies that write a graph.

There is one rounding rule, half to even, and one place where a result is rounded: `rescale`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def centered(x: Tensor, zero_point: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """`x - zero_point`, in a type with room for it."""
    wide = aten.to.dtype(x, dtype)
    if isinstance(zero_point, int):
        return wide if zero_point == 0 else aten.sub.Tensor(wide, zero_point)
    return aten.sub.Tensor(wide, aten.to.dtype(zero_point, dtype))


def rescale(
    accumulator: Tensor,
    multiplier: Tensor,
    shift: Tensor | None,
    zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    """An accumulator on the grid of a result: `clamp(round_half_even(acc * M) + zero_point, qmin, qmax)` in float64.

    With `shift` the multiplier is `mantissa * 2^-shift` and the product is formed and rounded in 64-bit integers. If
    `dtype` is float32 the result is `f32(acc * M)`: there the integers end.
    """
    if dtype.is_floating_point:
        return aten.to.dtype(aten.mul.Tensor(aten.to.dtype(accumulator, torch.float64), multiplier), dtype)
    if shift is None:
        levels = aten.round.default(aten.mul.Tensor(aten.to.dtype(accumulator, torch.float64), multiplier))
    else:
        product = aten.mul.Tensor(aten.to.dtype(accumulator, torch.int64), aten.to.dtype(multiplier, torch.int64))
        levels = shifted(product, shift)
    return aten.to.dtype(aten.clamp.default(aten.add.Tensor(levels, zero_point), qmin, qmax), dtype)


def shifted(product: Tensor, shift: Tensor) -> Tensor:
    """`round_half_even(product * 2^-shift)` on 64-bit integers."""
    places = aten.to.dtype(shift, torch.int64)
    floor = aten.bitwise_right_shift.Tensor(product, places)
    rest = aten.sub.Tensor(product, aten.bitwise_left_shift.Tensor(floor, places))
    half = aten.bitwise_left_shift.Tensor(aten.full_like.default(places, 1), aten.sub.Tensor(places, 1))
    odd = aten.bitwise_and.Scalar(floor, 1)
    up = aten.logical_or.default(
        aten.gt.Tensor(rest, half), aten.logical_and.default(aten.eq.Tensor(rest, half), aten.eq.Scalar(odd, 1))
    )
    return aten.add.Tensor(floor, aten.to.dtype(up, torch.int64))
