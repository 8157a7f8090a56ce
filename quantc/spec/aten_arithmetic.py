"""Building blocks of the integer references, in ATen primitives: they run on tensors, and on proxies that record a
graph.

One function rounds results, `round_to_grid`: half to even, or as the arithmetic of a target says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.spec.arithmetic import Rounding

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
    rounding: Rounding = "half-even",
    saturate: bool = True,
) -> Tensor:
    """Requantize an accumulator: `clamp(round(acc * M) + zero_point, qmin, qmax)` in float64.

    With `shift` the multiplier is `mantissa * 2^-shift` and the product is formed and rounded in 64-bit integers. If
    `dtype` is float32 the result is dequantized: `f32(acc * M)`.
    """
    if shift is None:
        product = aten.mul.Tensor(aten.to.dtype(accumulator, torch.float64), multiplier)
    else:
        product = aten.mul.Tensor(aten.to.dtype(accumulator, torch.int64), aten.to.dtype(multiplier, torch.int64))
    return round_to_grid(product, shift, zero_point, qmin, qmax, dtype, rounding, saturate)


def round_to_grid(
    total: Tensor,
    shift: Tensor | None,
    zero_point: int,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    rounding: Rounding = "half-even",
    saturate: bool = True,
) -> Tensor:
    """Round onto a grid: a float64 number of steps or, with `shift`, an int64 number of `2^-shift` steps. If `dtype` is
    float32, `total` is a real number in float64 and is rounded to float32. Unless it saturates, the result wraps around
    in `dtype`, and is then clamped to `qmin..qmax`."""
    if not dtype.is_floating_point:
        levels = rounded(total, rounding) if shift is None else rounding_shift(total, shift, rounding)
        if not saturate:
            levels = aten.to.dtype(_within_limit(levels), torch.int64)
        total = aten.add.Tensor(levels, zero_point)
        if not saturate:
            total = aten.to.dtype(aten.to.dtype(total, dtype), torch.int64)
        total = aten.clamp.default(total, qmin, qmax)
    result: Tensor = aten.to.dtype(total, dtype)
    return result


def rounded(x: Tensor, rounding: Rounding = "half-even") -> Tensor:
    """A float64 number rounded to an integer."""
    if rounding == "half-even":
        nearest: Tensor = aten.round.default(x)
        return nearest
    if rounding in ("truncate", "floor"):
        whole: Tensor = (aten.trunc if rounding == "truncate" else aten.floor).default(x)
        return whole
    if rounding == "half-away":
        part = aten.trunc.default(x)
        rest = aten.sub.Tensor(x, part)  # exact, with the sign of x
        up = aten.mul.Tensor(aten.sign.default(rest), aten.ge.Scalar(aten.abs.default(rest), 0.5))
        away: Tensor = aten.add.Tensor(part, up)
        return away
    floor = aten.floor.default(x)
    up = aten.ge.Scalar(aten.sub.Tensor(x, floor), 0.5)  # a difference that is rounded keeps its side of a half
    result: Tensor = aten.add.Tensor(floor, aten.to.dtype(up, torch.float64))
    return result


def _within_limit(levels: Tensor) -> Tensor:
    """Levels that an int64 holds. Beyond 2^40 nothing is left of what would wrap around."""
    clamped: Tensor = aten.clamp.default(levels, -(2**LIMIT_PLACES), 2**LIMIT_PLACES)
    return clamped


def rounding_shift(product: Tensor, shift: Tensor, rounding: Rounding = "half-even") -> Tensor:
    """`round(product * 2^-shift)` on 64-bit integers, for any shift.

    A negative shift multiplies; the product is clamped to 2^40 then, which every clamp to a grid cuts off anyway.
    """
    wanted = aten.to.dtype(shift, torch.int64)
    product = _shifted_left(product, wanted, 1 if rounding == "floor" else 0)
    places = aten.clamp.default(wanted, 0, 63)
    floor = aten.bitwise_right_shift.Tensor(product, places)
    rest = aten.sub.Tensor(product, aten.bitwise_left_shift.Tensor(floor, places))
    half = aten.bitwise_left_shift.Tensor(
        aten.full_like.default(places, 1), aten.clamp.default(aten.sub.Tensor(places, 1), 0)
    )
    up = _goes_up(product, floor, rest, half, rounding)
    nearest: Tensor = floor if up is None else aten.add.Tensor(floor, aten.to.dtype(up, torch.int64))
    return nearest


def _goes_up(product: Tensor, floor: Tensor, rest: Tensor, half: Tensor, rounding: Rounding) -> Tensor | None:
    """Mask of the quotients, of which `rest` is left, that are rounded up; None if none is."""
    if rounding == "floor":
        return None
    up: Tensor
    if rounding == "half-up":
        up = aten.ge.Tensor(rest, half)
    elif rounding == "truncate":
        up = aten.logical_and.default(aten.lt.Scalar(product, 0), aten.gt.Scalar(rest, 0))
    else:
        odd = aten.bitwise_and.Scalar(floor, 1) if rounding == "half-even" else None
        more, tie = aten.gt.Tensor(rest, half), aten.eq.Tensor(rest, half)
        ahead = aten.ge.Scalar(product, 0) if odd is None else aten.eq.Scalar(odd, 1)
        up = aten.logical_or.default(more, aten.logical_and.default(tie, ahead))
    return up


def _shifted_left(product: Tensor, shift: Tensor, far: int = 0) -> Tensor:
    """The operand of the right shift: the product itself; the product shifted left already if the shift is negative; or
    the product times `far` if the shift exceeds 63, where half a step does not fit 64 bits. The cases are computed on the shift, which is
    small, and cost the product two ops."""
    left = aten.clamp.default(aten.neg.default(shift), 0, LIMIT_PLACES)
    one = aten.full_like.default(left, 1)
    factor = aten.where.ScalarSelf(aten.gt.Scalar(shift, 63), far, aten.bitwise_left_shift.Tensor(one, left))
    most = aten.bitwise_left_shift.Tensor(one, aten.sub.Tensor(aten.full_like.default(left, LIMIT_PLACES), left))
    most = aten.where.ScalarOther(aten.gt.Scalar(left, 0), most, 2**63 - 1)
    ready: Tensor = aten.mul.Tensor(aten.clamp.Tensor(product, aten.neg.default(most), most), factor)
    return ready
