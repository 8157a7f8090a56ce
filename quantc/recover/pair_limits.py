"""Limits on neighbouring weights: sums of two products that an instruction adds in 16 bits.

Where `convert` would raise the scales of such channels, rounding can keep the finer scale, if it keeps the sums of
neighbours in their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.proof.pair_sums import adjacent
from quantc.integer.proof.weight_fitting import PairFit
from quantc.spec.instruction_sets import PairSums
from quantc.spec.spec import QuantSpec


@dataclass(frozen=True, slots=True, eq=False)
class PairLimit:
    """The instruction that adds two products, and the activations it multiplies."""

    sums: PairSums
    x: Levels

    def binds(self, spec: QuantSpec) -> bool:
        """True if levels of a spec can leave the bits."""
        low, high = self.sums.multiplied(self.x.qmin, self.x.qmax, self.x.signed)
        most = max(abs(low), abs(high)) * max(-spec.qmin, spec.qmax)
        return 2 * most >= 1 << (self.sums.bits - 1)

    def with_other(self, other: PairLimit) -> PairLimit:
        """The limit for a weight that both sorts of activations multiply."""
        x, y = self.x, other.x
        return PairLimit(self.sums, Levels(min(x.qmin, y.qmin), max(x.qmax, y.qmax), x.dtype if x.signed else y.dtype))

    def fits(self, weights: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
        """For each scale whether the sums of its channels fit, of weights in the shape of `bounds.by_channel`."""
        return PairFit(weights, spec, self.x, self.sums).least(scale) <= scale

    def neighbours(self, inputs: int, taps: int) -> Neighbours | None:
        """The limits by column of a channel's row; None if there are none that hold for single pairs."""
        low, high = self.sums.multiplied(self.x.qmin, self.x.qmax, self.x.signed)
        if self.sums.neighbours != "adjacent" or low < 0 or high <= 0:
            return None
        firsts, seconds = (each[0] for each in adjacent(torch.arange(inputs * taps).reshape(1, inputs, taps)))
        most = 2 ** (self.sums.bits - 1)
        table: list[list[int]] = [[] for _ in range(inputs * taps)]
        for first, second in zip(firsts.tolist(), seconds.tolist(), strict=True):
            if second not in table[first]:
                table[first].append(second)
                table[second].append(first)
        return Neighbours(tuple(map(tuple, table)), most // high, (most - 1) // high)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """For each column those that are added to it, and what the levels below and above zero of two may come to."""

    of: tuple[tuple[int, ...], ...]
    below: int
    above: int

    def ordered(self, order: list[int]) -> Neighbours:
        """The limits of columns in another order."""
        places = {column: place for place, column in enumerate(order)}
        return Neighbours(
            tuple(tuple(places[other] for other in self.of[column]) for column in order), self.below, self.above
        )

    def bounds(self, levels: Any, column: int, qmin: int, qmax: int) -> tuple[Any, Any]:
        """The levels that a column may take beside what its neighbours have, `[groups, columns, outputs]`."""
        low: Any = max(qmin, -self.below)
        high: Any = min(qmax, self.above)
        for other in self.of[column]:
            beside = levels[:, other]
            high = np.minimum(self.above - np.maximum(beside, 0), high)
            low = np.maximum(-self.below - np.minimum(beside, 0), low)
        return low, high
