"""How much narrower the ranges of a product must be for its pair sums to fit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quantc.instruction_sets import PairSums
from quantc.integer.factors import Factors, Weights

PLACES = 1e4
"""Factors are rounded up to four decimals."""


def largest_activation(found: Factors, sums: PairSums) -> int | None:
    """The largest quantized activation with which no pair can leave its bits; None if a grid so small would not hold
    zero and a number above it."""
    low, high = max(found.x.qmin, 0) - 1, found.x.qmax
    while high - low > 1:
        middle = (low + high) // 2
        fits = not bool(found.pairs(sums, middle).beyond(sums.bits).any())
        low, high = (middle, high) if fits else (low, middle)
    return low if low >= max(found.x.qmin, 0) + 1 else None


def weight_factors(found: Factors, sums: PairSums) -> tuple[float, ...]:
    """By how much the weight scale of each output channel must grow; 1 where nothing can overflow, none if there are no
    weights.

    With it the pairs fit whatever the weights were before they were rounded, unless they were clipped. `convert`,
    which has them, finds the least factor that will do.
    """
    if not isinstance(found.other, Weights):
        return ()
    low, high = sums.multiplied(found.x.qmin, found.x.qmax, found.x.signed)
    beyond = found.pairs(sums).beyond(sums.bits)
    up, down = _two_largest(found.decisive), _two_largest(-found.decisive)
    limit = 2 ** (sums.bits - 1) - 1
    if low < 0:  # a weight of either sign can make a product of either sign
        up = down = _two_largest(found.decisive.abs())
    farthest = max(abs(low), abs(high), 1)
    # each of the two may have been rounded down by half a step, and may be rounded up by as much again
    needed = torch.maximum(up, down).add(1) / (limit // farthest)
    exact = [max(math.ceil(factor * PLACES + 1) / PLACES, 1.0) for factor in needed.tolist()]
    return tuple(factor if unsafe else 1.0 for factor, unsafe in zip(exact, beyond.tolist(), strict=True))


def _two_largest(weights: Tensor) -> Tensor:
    """The sum of the two largest weights of each channel, of those above zero."""
    flat = weights.flatten(1).clamp(min=0)
    return flat.topk(min(2, flat.shape[1]), dim=1).values.sum(dim=1)
