"""Smallest weight scales for which sums of two products fit their bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quantc.integer.proof.bounds import decisive, pair_reach
from quantc.integer.proof.integer_ranges import Levels
from quantc.integer.proof.pair_sums import adjacent
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.instruction_sets import Neighbours, PairSums
from quantc.spec.numerics import QParams, quantize
from quantc.spec.spec import QuantSpec

PAIRS = 4
"""Number of pairs of each sign tried first."""


@dataclass(frozen=True, eq=False)
class PairFit:
    """Weights of one conv or matmul, to be quantized so that no pair sum overflows.

    `weights` are floats in the shape of `bounds.by_channel`. Per-channel scales are along one axis of the weight; where
    channels repeat for each group or batch, so do the scales.
    """

    weights: Tensor
    spec: QuantSpec
    x: Levels
    sums: PairSums

    def _fits(self, weights: Tensor, scale: Tensor, neighbours: Neighbours) -> Tensor:
        """For each scale whether all channels that have it fit."""
        levels = decisive(self._levels(weights, scale), neighbours).to(torch.int64)
        low, high = self.sums.multiplied(self.x.qmin, self.x.qmax, self.x.signed)
        beyond = pair_reach(levels, low, high).beyond(self.sums.bits)
        return ~beyond.reshape(-1, scale.numel()).any(dim=0).reshape(scale.shape)

    def _levels(self, weights: Tensor, scale: Tensor) -> Tensor:
        """Quantized just as the program will have it."""
        scales = scale.repeat(weights.shape[0] // scale.numel()) if scale.dim() else scale
        spec = self._by_row if scale.dim() else self._whole
        return quantize(weights, QParams(scales, torch.zeros_like(scales, dtype=torch.int64)), spec)

    @cached_property
    def _by_row(self) -> QuantSpec:
        return self.spec.but(granularity=PerChannel(axis=0))

    @cached_property
    def _whole(self) -> QuantSpec:
        return self.spec.but(granularity=PerTensor())

    def least(self, scale: Tensor) -> Tensor:
        """Smallest float32 scales, not below the given ones, for which all channels fit.

        A larger scale never makes an integer larger, so bisection finds it; positive floats are ordered like their
        bits.
        """
        if self.sums.neighbours == "any":
            return self._least(decisive(self.weights), scale, "any")  # rounding keeps the order, so they decide
        # rounding does not preserve the order of pair sums, but the largest few almost always decide
        least = self._least(_largest_pairs(self.weights), scale, "adjacent")
        left = ~self._fits(self.weights, least, "adjacent")
        if not bool(left.any()):
            return least
        if not scale.dim():
            return self._least(self.weights, least, "adjacent")
        rows = self.weights[left.repeat(len(self.weights) // scale.numel())]
        return least.masked_scatter(left, self._least(rows, least[left], "adjacent"))

    def _least(self, weights: Tensor, scale: Tensor, neighbours: Neighbours) -> Tensor:
        fitting = self._fits(weights, scale, neighbours)
        if bool(fitting.all()):
            return scale
        enough = scale.clone()
        while not bool((done := self._fits(weights, enough, neighbours)).all()):
            enough = torch.where(done, enough, enough * 2)
        low, high = scale.view(torch.int32), enough.view(torch.int32)
        while bool((high - low > 1).any()):
            middle = low + (high - low) // 2
            ok = self._fits(weights, middle.view(torch.float32), neighbours)
            low, high = torch.where(ok, low, middle), torch.where(ok, middle, high)
        return torch.where(fitting, scale, high.view(torch.float32))


def _largest_pairs(weights: Tensor) -> Tensor:
    """The pairs of neighbours with the largest sums and those with the smallest, as weights of two input channels that
    have no other pairs."""
    firsts, seconds = adjacent(weights)
    if not firsts.shape[1]:
        return weights
    most = min(PAIRS, firsts.shape[1])
    above = (firsts.clamp(min=0) + seconds.clamp(min=0)).topk(most, dim=1).indices
    below = (firsts.clamp(max=0) + seconds.clamp(max=0)).topk(most, dim=1, largest=False).indices
    at = torch.cat((above, below), dim=1)
    return torch.stack((firsts.gather(1, at), seconds.gather(1, at)), dim=1)
