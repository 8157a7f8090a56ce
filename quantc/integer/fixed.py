"""Multipliers as hardware has them: a 32-bit mantissa and a shift."""

from __future__ import annotations

import torch
from torch import Tensor

MANTISSA_BITS = 31


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
