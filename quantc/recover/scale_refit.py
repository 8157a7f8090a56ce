"""Scales of least squared error for levels that are given."""

from __future__ import annotations

import torch
from torch import Tensor

from quantc.recover.layers import Layer
from quantc.spec.formats import PerChannel, PerGroup
from quantc.spec.numerics import QParams, allowed_scale

RIDGE = 1e-6
WIDEST = 2.0
"""How far a scale may move from its old value, as a factor."""
CHUNK = 1 << 24
"""The number of elements of an intermediate."""


def refit(layer: Layer, levels: Tensor, qparams: QParams, products: Tensor, order: list[int]) -> QParams | None:
    """Scales, jointly for all groups of an output, with which levels by groups `[groups, outputs, inputs]` change the
    output least. `products` are of the columns in that order. None if outputs share scales."""
    share = layer.spec.granularity
    if not isinstance(share, PerChannel | PerGroup):
        return None
    number = layer.numbers(qparams)
    starts = number.amin(2, keepdim=True)
    local = number - starts
    if not bool((local == local[:1, :1]).all()) or len(set(starts.flatten().tolist())) < starts.numel():
        return None  # outputs share scales
    local = local[0, 0][order]
    sets = int(local.max()) + 1
    grid = layer.grid(qparams)
    centered, weights = (levels - grid.zero_point)[..., order], layer.rows(layer.weight.double())[..., order]
    scale = grid.scale[..., order]
    found = torch.empty(*levels.shape[:2], sets, dtype=torch.float64)
    first = torch.stack([scale[..., (local == each).nonzero()[0, 0]] for each in range(sets)], dim=2)
    step = max(1, CHUNK // (levels.shape[2] * sets))
    for start in range(0, levels.shape[1], step):
        part = slice(start, start + step)
        found[:, part] = _solved(centered[:, part], weights[:, part], products, local, first[:, part])
    found = torch.where(found > 0, found, first)
    found = torch.minimum(torch.maximum(found, first / WIDEST), first * WIDEST)
    by_set = torch.zeros_like(qparams.scale.reshape(-1), dtype=torch.float64)
    by_set[(starts + torch.arange(sets)).reshape(-1)] = found.reshape(-1)
    return QParams(allowed_scale(by_set.reshape(qparams.scale.shape).float(), layer.spec), qparams.zero_point)


def _solved(levels: Tensor, weights: Tensor, products: Tensor, local: Tensor, first: Tensor) -> Tensor:
    """The scales of some outputs, drawn a little towards those they had."""
    sets = first.shape[2]
    wanted = (weights @ products) * levels
    right = torch.zeros(first.shape, dtype=torch.float64).index_add_(2, local, wanted)
    left = torch.empty(*first.shape, sets, dtype=torch.float64)
    for each in range(sets):
        own = (local == each).nonzero()[:, 0]
        reach = (levels[..., own] @ products[:, own]) * levels
        left[..., each, :] = torch.zeros(first.shape, dtype=torch.float64).index_add_(2, local, reach)
    diagonal = left.diagonal(dim1=2, dim2=3)
    ridge = RIDGE * diagonal.mean(2, keepdim=True) + 1e-300
    left = left + torch.diag_embed(ridge.expand_as(diagonal))
    right = right + ridge * first
    found: Tensor = torch.linalg.solve(left, right.unsqueeze(3)).squeeze(3)
    return found
