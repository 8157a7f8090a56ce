"""Multipliers as hardware has them: a 32-bit mantissa and a shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MANTISSA_BITS = 31
MAX_SHIFT = 62
"""Of a sum below 2^62 this leaves less than one: more places would say nothing more."""
SUM_LIMIT = 2**62
"""What a sum of products stays below."""


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
    """The multipliers of a sum as int32 mantissas on one shift, its offset as an int64 on the same, and the shift.

    `largest[i]` is the most that the i-th factor can be. The shift is the largest up to 62 with which all mantissas
    fit, and `Σ largest_i * |mantissa_i| + |offset| < 2^62`: so the sum, in any order, stays inside an int64, and so
    does what rounds it. None if there is no such shift, as with a multiplier of 2^30.
    """
    peaks = [_peak(item) for item in multipliers]
    constant = 0.0 if offset is None else _peak(offset)
    for shift in range(MAX_SHIFT, 0, -1):
        # exact: a float64 times a power of two, rounded half to even to a whole number
        mantissas = [round(peak * 2.0**shift) for peak in peaks]
        total = sum(most * size for most, size in zip(largest, mantissas, strict=True)) + round(constant * 2.0**shift)
        if max(mantissas, default=0) < 2**MANTISSA_BITS and total < SUM_LIMIT:
            break
    else:
        return None
    factor = 2.0**shift
    return (
        [torch.round(item.double() * factor).to(torch.int32) for item in multipliers],
        None if offset is None else torch.round(offset.double() * factor).to(torch.int64),
        torch.tensor(shift, dtype=torch.int32),
    )


def _peak(values: Tensor) -> float:
    return float(values.double().abs().max()) if values.numel() else 0.0
