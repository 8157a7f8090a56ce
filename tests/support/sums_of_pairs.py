"""Sums of two products in 16 bits, by trying all pairs."""

from __future__ import annotations

import itertools

from quantc.spec.instruction_sets import PairSums

INT16 = (-(2**15), 2**15 - 1)
MADDUBS = PairSums("unsigned", "saturates")
"""As `pmaddubsw`, of any two products."""


def pairs_fit(row: list[int], qmax: int) -> bool:
    """Whether any two products, or one, fit 16 bits: by trying all."""
    sums = [0, *(qmax * w for w in row), *(qmax * (a + b) for a, b in itertools.combinations(row, 2))]
    return INT16[0] <= min(sums) and max(sums) <= INT16[1]
