"""Scales of weights by the error of the layer's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.recover.fitting import Proposal
from quantc.recover.layers import Layer
from quantc.spec.formats import Scheme
from quantc.spec.granularity import as_rows, extremes
from quantc.spec.numerics import QParams, fake_quantize, qparams_from_range

LEAST = {8: 0.7, 4: 0.45, 3: 0.35, 2: 0.25}
"""The narrowest range tried, relative to that of the weights, by bits."""
COARSE, FINE = 8, 2
"""The number of ranges tried first, and how often the step between them is halved around the best."""
CHUNK = 1 << 18
"""The number of weights processed together, so that intermediates stay in the cache."""
LEAST_GAIN = 1e-5
"""The share of an error that a change must take away: less is rounding of float32."""


def rescaled(layer: Layer) -> Proposal | str:
    """The scales of least squared error, each input weighted with its mean square; rounded to nearest."""
    found = searched(layer, layer.objective.fit.energy)
    return Proposal(fake_quantize(layer.weight, found, layer.spec), found, layer.shift)


def searched(layer: Layer, energy: Tensor) -> QParams:
    """The scales and zero points with which rounding to nearest has the least squared error, each input weighted with an
    energy, `[groups, inputs]`; those that the layer has, where no others are better."""
    search = _Search.of(layer, energy)
    least = min((reach for bits, reach in LEAST.items() if bits >= _bits(layer.spec.levels)), default=LEAST[8])
    shares = torch.linspace(1.0, least, COARSE)
    for share in shares.tolist():
        search.try_share(torch.full_like(search.share, share))
    step = float(shares[0] - shares[1])
    for _ in range(FINE):
        step /= 2
        best = search.share
        for side in (best - step, best + step):
            search.try_share(side)
    if layer.spec.scheme is Scheme.AFFINE:
        best_zero = search.zero_point
        for offset in (-1, 1):
            search.keep(search.scale, best_zero + offset, search.share)
    shape = layer.qparams.scale.shape
    return QParams(search.scale.reshape(shape), search.zero_point.reshape(shape))


@dataclass(slots=True, eq=False)
class _Search:
    """The best scales so far, by set of weights that share one."""

    layer: Layer
    rows: Tensor
    importance: Tensor
    low: Tensor
    high: Tensor
    scale: Tensor
    zero_point: Tensor
    share: Tensor
    """The range that a scale is of, relative to that of the weights."""
    error: Tensor

    @staticmethod
    def of(layer: Layer, energy: Tensor) -> _Search:
        weight, spec = layer.weight, layer.spec
        unit = energy / energy.mean().clamp(min=1e-300)
        importance = layer.as_weight(unit.float().unsqueeze(1).expand(layer.rows(weight).shape))
        low, high = (x.flatten() for x in extremes(weight, spec.granularity))
        scale, zero_point = (x.flatten() for x in (layer.qparams.scale, layer.qparams.zero_point))
        rows = as_rows(weight, spec.granularity)
        found = _Search(
            layer,
            rows,
            as_rows(importance, spec.granularity),
            low,
            high,
            scale,
            zero_point,
            torch.ones_like(low),
            torch.full_like(low, torch.inf),
        )
        found.error = found._errors(scale, zero_point)
        return found

    def try_share(self, share: Tensor) -> None:
        share = share.clamp(min=0)
        found = qparams_from_range(self.low * share, self.high * share, self.layer.spec)
        self.keep(found.scale, found.zero_point, share)

    def keep(self, scale: Tensor, zero_point: Tensor, share: Tensor) -> None:
        """Keep what is better than the best so far, for each set."""
        spec = self.layer.spec
        zero_point = zero_point.clamp(spec.qmin, spec.qmax)
        error = self._errors(scale, zero_point)
        better = error < self.error * (1 - LEAST_GAIN)
        if self.layer.limit is not None:  # what `convert` would raise again
            better &= scale >= self.layer.qparams.scale.flatten()
        self.scale, self.zero_point = (
            torch.where(better, scale, self.scale),
            torch.where(better, zero_point, self.zero_point),
        )
        self.share, self.error = torch.where(better, share, self.share), torch.where(better, error, self.error)

    def _errors(self, scale: Tensor, zero_point: Tensor) -> Tensor:
        """The weighted squared error of each set."""
        spec, found = self.layer.spec, torch.zeros_like(scale)
        inverse = (1.0 / scale).unsqueeze(1)
        first, last = ((end - zero_point).to(scale.dtype).unsqueeze(1) for end in (spec.qmin, spec.qmax))
        step = max(1, CHUNK // self.rows.shape[1])
        for start in range(0, len(self.rows), step):
            part = slice(start, start + step)
            exact = self.rows[part] * inverse[part]
            levels = torch.round(exact).clamp_(first[part], last[part])
            found[part] = levels.sub_(exact).square_().mul_(self.importance[part]).sum(1)
        return found * scale.square()


def _bits(levels: int) -> int:
    return (levels - 1).bit_length()
