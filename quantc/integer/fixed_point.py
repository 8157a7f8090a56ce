"""Fixed-point multipliers: a mantissa and a shift, as in hardware."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MANTISSA_BITS = 31
MAX_SHIFT = 62
"""Of a sum below 2^62 this leaves less than one: more places would say nothing more."""
SUM_BITS = 61
"""Maximum number of bits of a sum of products."""


def mantissa_and_shift(multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """`multiplier ≈ mantissa * 2^-shift` with a signed 31-bit mantissa, both int32.

    The mantissa is rounded once, half to even: its relative error is at most 2^-31.
    """
    fraction, exponent = torch.frexp(multiplier.double())
    mantissa = torch.round(fraction * 2.0**MANTISSA_BITS)
    over = mantissa.abs() == 2.0**MANTISSA_BITS  # rounded up to the next power of two
    mantissa = torch.where(over, mantissa / 2, mantissa)
    exponent = torch.where(over, exponent + 1, exponent)
    return mantissa.to(torch.int32), (MANTISSA_BITS - exponent).to(torch.int32)


def shift_of(multiplier: Tensor) -> Tensor | None:
    """The shift, int32, that a multiplier is; None if it is no positive power of two."""
    fraction, exponent = torch.frexp(multiplier.double())
    return (1 - exponent).to(torch.int32) if bool((fraction == 0.5).all()) else None


def whole_shifts(multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """Mantissa 1 and shift, both int32, of powers of two."""
    shift = (1 - torch.frexp(multiplier.double()).exponent).to(torch.int32)
    return torch.ones_like(shift), shift


def common_shift(
    multipliers: Sequence[Tensor], largest: Sequence[int], offset: Tensor | None = None, *, least: bool = False
) -> tuple[list[Tensor], Tensor | None, Tensor] | None:
    """Multipliers of a sum as int64 mantissas with a common shift, its offset with the same shift, and the shift.

    `largest[i]` bounds the i-th factor. Multipliers and offset broadcast, and where they have several elements there
    are as many shifts: a channel whose multiplier is far smaller than the others' keeps its precision. For each, `Σ
    largest_i * |multiplier_i| + |offset|`, times `2^shift`, is below 2^61: rounding the mantissas adds far less than as
    much again, so the sum, in any order, fits int64, and so does its rounding. None if that would need a shift below 1.

    Mantissas of a sum have more than 32 bits where the other terms leave room: a factor with a large multiplier has few
    bits then, and the smaller ones need the precision. `least` is for powers of two: the smallest shift that makes them
    integers, to which the offset is rounded.
    """
    total = torch.zeros((), dtype=torch.float64) if offset is None else offset.double().abs()
    for multiplier, most in zip(multipliers, largest, strict=True):
        total = total + multiplier.double().abs() * most
    shift = (SUM_BITS - torch.frexp(total).exponent).clamp(max=MAX_SHIFT)
    if least:
        places = [1 - torch.frexp(item.double()).exponent for item in multipliers]
        wanted = torch.stack(torch.broadcast_tensors(*places, torch.ones_like(places[0]))).amax(dim=0)  # type: ignore[no-untyped-call]
        if bool((wanted > shift).any()):
            return None
        shift = wanted
    if bool((shift < 1).any()):
        return None
    factor = torch.exp2(shift.double())
    return (
        [torch.round(item.double() * factor).to(torch.int64) for item in multipliers],
        None if offset is None else torch.round(offset.double() * factor).to(torch.int64),
        shift.to(torch.int32),
    )
