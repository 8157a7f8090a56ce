"""Range reductions that make the pair sums of a conv or matmul fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantc.integer.proof.factors import Factors, Weights
from quantc.spec.instruction_sets import PairSums

PLACES = 1e4
"""Factors are rounded up to four decimals."""


def largest_activation(found: Factors, sums: PairSums) -> int | None:
    """Largest quantized activation for which no pair sum overflows; None if such a grid would not hold zero and a value above it."""
    smallest, largest = max(found.x.qmin, 0), found.x.qmax
    multiplied_low, multiplied_high = sums.multiplied(found.x.qmin, largest, found.x.signed)
    if multiplied_low >= 0:  # then sums are monotone in the largest activation, and one division suffices
        farthest = 2 ** (sums.bits - 1) - 1
        up, down = (int(_two_largest(weights).max()) for weights in (found.decisive(sums), -found.decisive(sums)))
        most = min(farthest // up if up else multiplied_high, (farthest + 1) // down if down else multiplied_high)
        fitting = min(most - (multiplied_high - largest), largest)
    else:
        fitting, beyond = smallest - 1, largest
        while beyond - fitting > 1:
            middle = (fitting + beyond) // 2
            fits = not bool(found.pairs(sums, middle).beyond(sums.bits).any())
            fitting, beyond = (middle, beyond) if fits else (fitting, middle)
    return fitting if fitting > smallest else None


def weight_factors(found: Factors, sums: PairSums) -> tuple[float, ...]:
    """Factor by which the weight scale of each output channel must grow; 1 where nothing can overflow, empty if there are no weights.

    With it the pairs fit whatever the weights were before rounding, unless they were clipped. `convert`, which has
    them, finds the smallest sufficient factor.
    """
    if not isinstance(found.other, Weights):
        return ()
    low, high = sums.multiplied(found.x.qmin, found.x.qmax, found.x.signed)
    beyond = found.pairs(sums).beyond(sums.bits)
    up, down = _two_largest(found.decisive(sums)), _two_largest(-found.decisive(sums))
    limit = 2 ** (sums.bits - 1) - 1
    if low < 0:  # a weight of either sign can make a product of either sign
        up = down = _two_largest(found.decisive(sums).abs())
    farthest = max(abs(low), abs(high), 1)
    # each of the two may have been rounded down by half a step, and may be rounded up by as much again
    needed = torch.maximum(up, down).add(1) / (limit // farthest)
    exact = [max(math.ceil(factor * PLACES + 1) / PLACES, 1.0) for factor in needed.tolist()]
    return tuple(factor if unsafe else 1.0 for factor, unsafe in zip(exact, beyond.tolist(), strict=True))


def _two_largest(weights: Tensor) -> Tensor:
    """The sum of the two largest weights of each channel, of those above zero."""
    flat = weights.flatten(1).clamp(min=0)
    return flat.topk(min(2, flat.shape[1]), dim=1).values.sum(dim=1)
