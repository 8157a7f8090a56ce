"""Scales of weights by the error of the layer's output."""

from __future__ import annotations

import torch
from torch import Tensor

from quantc.recover.fitting import Proposal
from quantc.recover.layers import Layer
from quantc.spec.granularity import as_rows, extremes
from quantc.spec.numerics import QParams, fake_quantize, qparams_from_range

LEAST = {8: 0.7, 4: 0.45, 3: 0.35, 2: 0.25}
"""The narrowest range tried, relative to that of the weights, by bits."""
STEPS = 24


def rescaled(layer: Layer) -> Proposal | str:
    """The scales of least squared error, each input weighted with its mean square; rounded to nearest."""
    weight, spec = layer.weight, layer.spec
    energy = layer.objective.fit.energy
    importance = layer.as_weight(energy.unsqueeze(1).expand(layer.rows(weight).shape))
    low, high = extremes(weight, spec.granularity)
    best, best_error = layer.qparams, _error(weight, importance, layer.qparams, layer)
    least = min((reach for bits, reach in LEAST.items() if bits >= _bits(spec.levels)), default=LEAST[8])
    for share in torch.linspace(1.0, least, STEPS).tolist():
        found = qparams_from_range(low * share, high * share, spec)
        error = _error(weight, importance, found, layer)
        better = error < best_error
        if layer.limit is not None:  # what `convert` would raise again
            better &= found.scale >= layer.qparams.scale
        best = QParams(
            torch.where(better, found.scale, best.scale), torch.where(better, found.zero_point, best.zero_point)
        )
        best_error = torch.where(better, error, best_error)
    return Proposal(fake_quantize(weight, best, spec), best, layer.shift)


def _bits(levels: int) -> int:
    return (levels - 1).bit_length()


def _error(weight: Tensor, importance: Tensor, qparams: QParams, layer: Layer) -> Tensor:
    """The weighted squared error of each set of weights that shares a scale."""
    error = (weight - fake_quantize(weight, qparams, layer.spec)).square_().mul_(importance)
    return as_rows(error, layer.spec.granularity).sum(1).reshape(qparams.scale.shape)
