"""Multipliers as hardware has them: a mantissa and a shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MANTISSA_BITS = 31
MAX_SHIFT = 62
"""Of a sum below 2^62 this leaves less than one: more places would say nothing more."""
SUM_BITS = 61
"""How many bits a sum of products has at most."""


def mantissa_and_shift(multiplier: Tensor) -> tuple[Tensor, Tensor]:
    """`multiplier ≈ mantissa * 2^-shift` with a mantissa of 31 bits and its sign, both int32.

    The mantissa is rounded once, half to even: it is off by at most 2^-31 of the multiplier.
    """
    fraction, exponent = torch.frexp(multiplier.double())
    mantissa = torch.round(fraction * 2.0**MANTISSA_BITS)
    over = mantissa.abs() == 2.0**MANTISSA_BITS  # rounded up to the next power of two
    mantissa = torch.where(over, mantissa / 2, mantissa)
    exponent = torch.where(over, exponent + 1, exponent)
    return mantissa.to(torch.int32), (MANTISSA_BITS - exponent).to(torch.int32)


def common_shift(
    multipliers: Sequence[Tensor], largest: Sequence[int], offset: Tensor | None = None
) -> tuple[list[Tensor], Tensor | None, Tensor] | None:
    """The multipliers of a sum as int64 mantissas on one shift, its offset on the same, and the shift.

    `largest[i]` is the most that the i-th factor can be. Multipliers and offset go together by broadcasting, and where
    they have several elements there are as many shifts: a channel whose multiplier is far smaller than the others'
    keeps its places. With each, `Σ largest_i * |multiplier_i| + |offset|`, times `2^shift`, is below 2^61: rounding
    the mantissas adds far less than as much again, so the sum, in any order, stays inside an int64, and so does what
    rounds it. None if that would take a shift below 1.

    Mantissas of a sum have more than 32 bits where the other terms leave room: a product with a large multiplier is of
    few bits then, and the smaller ones need the places.
    """
    total = torch.zeros((), dtype=torch.float64) if offset is None else offset.double().abs()
    for multiplier, most in zip(multipliers, largest, strict=True):
        total = total + multiplier.double().abs() * most
    shift = (SUM_BITS - torch.frexp(total).exponent).clamp(max=MAX_SHIFT)
    if bool((shift < 1).any()):
        return None
    factor = torch.exp2(shift.double())
    return (
        [torch.round(item.double() * factor).to(torch.int64) for item in multipliers],
        None if offset is None else torch.round(offset.double() * factor).to(torch.int64),
        shift.to(torch.int32),
    )
