"""The pieces every reference is made of, in ATen primitives: they run on tensors, and on proxies that write a graph.

There is one rounding rule, half to even, and one place where a result is rounded: `settled`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

LIMIT_PLACES = 40
"""What goes beyond 2^40 is cut off there: far outside every grid, and a zero point can still be added."""


def centered(x: Tensor, zero_point: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """`x - zero_point`, in a type with room for it."""
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
    """An accumulator on the grid of a result: `clamp(round_half_even(acc * M) + zero_point, qmin, qmax)` in float64.

    With `shift` the multiplier is `mantissa * 2^-shift` and the product is formed and rounded in 64-bit integers. If
    `dtype` is float32 the result is `f32(acc * M)`: there the integers end.
    """
    if shift is None:
        product = aten.mul.Tensor(aten.to.dtype(accumulator, torch.float64), multiplier)
    else:
        product = aten.mul.Tensor(aten.to.dtype(accumulator, torch.int64), aten.to.dtype(multiplier, torch.int64))
    return settled(product, shift, zero_point, qmin, qmax, dtype)


def settled(total: Tensor, shift: Tensor | None, zero_point: int, qmin: int, qmax: int, dtype: torch.dtype) -> Tensor:
    """A float64 number of steps, or with `shift` an int64 number of parts of a step, rounded onto a grid. If `dtype` is
    float32 the float64 is a real number, and is rounded to that."""
    if not dtype.is_floating_point:
        levels = aten.round.default(total) if shift is None else shifted(total, shift)
        total = aten.clamp.default(aten.add.Tensor(levels, zero_point), qmin, qmax)
    result: Tensor = aten.to.dtype(total, dtype)
    return result


def shifted(product: Tensor, shift: Tensor) -> Tensor:
    """`round_half_even(product * 2^-shift)` on 64-bit integers, for any shift.

    A shift below 0 multiplies; what then goes beyond 2^40 stays there, which every clamp to a grid cuts off anyway.
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
    """What is left to shift right: the product itself; shifted left already, if the shift is below 0; or 0, if the
    shift is more than 63 places, of which 64-bit integers cannot make one half. The sizes are decided on the shift,
    which is small, and cost the product two ops."""
    left = aten.clamp.default(aten.neg.default(shift), 0, LIMIT_PLACES)
    one = aten.full_like.default(left, 1)
    factor = aten.where.ScalarSelf(aten.gt.Scalar(shift, 63), 0, aten.bitwise_left_shift.Tensor(one, left))
    most = aten.bitwise_left_shift.Tensor(one, aten.sub.Tensor(aten.full_like.default(left, LIMIT_PLACES), left))
    most = aten.where.ScalarOther(aten.gt.Scalar(left, 0), most, 2**63 - 1)
    ready: Tensor = aten.mul.Tensor(aten.clamp.Tensor(product, aten.neg.default(most), most), factor)
    return ready
