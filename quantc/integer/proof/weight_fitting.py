"""The smallest weight scales with which sums of two products fit the bits they are added in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.formats import PerChannel, PerTensor
from quantc.instruction_sets import PairSums
from quantc.integer.proof.bounds import decisive, pair_reach
from quantc.integer.proof.ranges import Levels
from quantc.numerics import QParams, quantize
from quantc.spec import QuantSpec


@dataclass(frozen=True, eq=False)
class PairFit:
    """The weights of one product, which are to be quantized so that no pair can leave its bits.

    `weights` are floats as `bounds.by_channel` has them. With one scale for each channel these lie on one axis of the
    weight; where that comes again for each group or batch, so do the scales.
    """

    weights: Tensor
    spec: QuantSpec
    x: Levels
    sums: PairSums

    def _fits(self, weights: Tensor, scale: Tensor) -> Tensor:
        """For each scale whether all channels that have it fit."""
        levels = self._levels(weights, scale).to(torch.int64)
        low, high = self.sums.multiplied(self.x.qmin, self.x.qmax, self.x.signed)
        beyond = pair_reach(levels, low, high).beyond(self.sums.bits)
        return ~beyond.reshape(-1, scale.numel()).any(dim=0).reshape(scale.shape)

    def _levels(self, weights: Tensor, scale: Tensor) -> Tensor:
        """Quantized just as the program will have it."""
        if not scale.dim():
            whole = self.spec.but(granularity=PerTensor())
            return quantize(weights, QParams(scale, torch.zeros_like(scale, dtype=torch.int64)), whole)
        scales = scale.repeat(weights.shape[0] // scale.numel())
        rows = self.spec.but(granularity=PerChannel(axis=0))
        return quantize(weights, QParams(scales, torch.zeros_like(scales, dtype=torch.int64)), rows)

    def least(self, scale: Tensor) -> Tensor:
        """The smallest float32 scales, none below those given, with which all channels fit.

        A larger scale never makes an integer larger, so halving finds it; positive floats are in the order of their
        bits.
        """
        weights = decisive(self.weights)  # rounding keeps the order, so they decide
        fitting = self._fits(weights, scale)
        if bool(fitting.all()):
            return scale
        enough = scale.clone()
        while not bool((done := self._fits(weights, enough)).all()):
            enough = torch.where(done, enough, enough * 2)
        low, high = scale.view(torch.int32), enough.view(torch.int32)
        while bool((high - low > 1).any()):
            middle = low + (high - low) // 2
            ok = self._fits(weights, middle.view(torch.float32))
            low, high = torch.where(ok, low, middle), torch.where(ok, middle, high)
        return torch.where(fitting, scale, high.view(torch.float32))
