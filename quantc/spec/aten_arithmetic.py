"""Building blocks of the integer references, in ATen primitives: they run on tensors, and on proxies that record a
graph.

There is one rounding rule, half to even, and one function that rounds results: `settled`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

LIMIT_PLACES = 40
"""Products are clamped to 2^40: far outside every grid, with room left to add a zero point."""


def center(x: Tensor, zero_point: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """`x - zero_point`, in a dtype wide enough for it."""
    wide: Tensor = aten.to.dtype(x, dtype)
    if isinstance(zero_point, int) and zero_point == 0:
        return wide
    offset = zero_point if isinstance(zero_point, int) else aten.to.dtype(zero_point, dtype)
    less: Tensor = aten.sub.Tensor(wide, offset)
    return less


def rescale(
    accumulator: Tensor,
    multiplier: Tensor,
    shift: Tensor | None,
    zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
) -> Tensor:
    """Requantize an accumulator: `clamp(round_half_even(acc * M) + zero_point, qmin, qmax)` in float64.

    With `shift` the multiplier is `mantissa * 2^-shift` and the product is formed and rounded in 64-bit integers. If
    `dtype` is float32 the result is dequantized: `f32(acc * M)`.
    """
    if shift is None:
        product = aten.mul.Tensor(aten.to.dtype(accumulator, torch.float64), multiplier)
    else:
        product = aten.mul.Tensor(aten.to.dtype(accumulator, torch.int64), aten.to.dtype(multiplier, torch.int64))
    return round_to_grid(product, shift, zero_point, qmin, qmax, dtype)


def round_to_grid(
    total: Tensor, shift: Tensor | None, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype
) -> Tensor:
    """Round onto a grid: a float64 number of steps or, with `shift`, an int64 number of `2^-shift` steps. If `dtype` is
    float32, `total` is a real number in float64 and is rounded to float32."""
    if not dtype.is_floating_point:
        levels = aten.round.default(total) if shift is None else rounding_shift(total, shift)
        total = aten.clamp.default(aten.add.Tensor(levels, zero_point), qmin, qmax)
    result: Tensor = aten.to.dtype(total, dtype)
    return result


def rounding_shift(product: Tensor, shift: Tensor) -> Tensor:
    """`round_half_even(product * 2^-shift)` on 64-bit integers, for any shift.

    A negative shift multiplies; the product is clamped to 2^40 then, which every clamp to a grid cuts off anyway.
    """
    wanted = aten.to.dtype(shift, torch.int64)
    product = _shifted_left(product, wanted)
    places = aten.clamp.default(wanted, 0, 63)
    floor = aten.bitwise_right_shift.Tensor(product, places)
    rest = aten.sub.Tensor(product, aten.bitwise_left_shift.Tensor(floor, places))
    half = aten.bitwise_left_shift.Tensor(
        aten.full_like.default(places, 1), aten.clamp.default(aten.sub.Tensor(places, 1), 0)
    )
    odd = aten.bitwise_and.Scalar(floor, 1)
    up = aten.logical_or.default(
        aten.gt.Tensor(rest, half), aten.logical_and.default(aten.eq.Tensor(rest, half), aten.eq.Scalar(odd, 1))
    )
    nearest: Tensor = aten.add.Tensor(floor, aten.to.dtype(up, torch.int64))
    return nearest


def _shifted_left(product: Tensor, shift: Tensor) -> Tensor:
    """The operand of the right shift: the product itself; the product shifted left already if the shift is negative; or
    0 if the shift exceeds 63, where half a step does not fit 64 bits. The cases are computed on the shift, which is
    small, and cost the product two ops."""
    left = aten.clamp.default(aten.neg.default(shift), 0, LIMIT_PLACES)
    one = aten.full_like.default(left, 1)
    factor = aten.where.ScalarSelf(aten.gt.Scalar(shift, 63), 0, aten.bitwise_left_shift.Tensor(one, left))
    most = aten.bitwise_left_shift.Tensor(one, aten.sub.Tensor(aten.full_like.default(left, LIMIT_PLACES), left))
    most = aten.where.ScalarOther(aten.gt.Scalar(left, 0), most, 2**63 - 1)
    ready: Tensor = aten.mul.Tensor(aten.clamp.Tensor(product, aten.neg.default(most), most), factor)
    return ready
