"""Factors of channels of least predicted noise.

With the steps of uniform grids in the place of rounding, noise is a sum of products of maxima and powers of the factors: a
generalized posynomial. In the logarithms of the factors it is convex, so that one descent finds all factors of a program
together, and no strength has to be guessed. Maxima are smoothed, more sharply towards the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from quantc.recover.noise_model import LayerNoise, NoiseModel, TensorNoise
from quantc.spec.formats import PerGroup, Scheme
from quantc.spec.granularity import as_rows

SHARPNESS = (6.0, 24.0)
"""How sharp the maxima are, one descent after the other."""
STEPS = 40
REACH = 12.0
"""The largest factor tried, as a power of two."""
PULL = 1e-4
"""How strongly factors that nothing depends on are drawn to 1."""

Noise = Callable[[Tensor, float], Tensor]
"""The noise for logarithms of factors (the last is 0), with maxima of some sharpness."""


def best_factors(model: NoiseModel, limits: Tensor, movable: Tensor) -> Tensor:
    """The logarithm (base 2) of a factor for each class, below that of its limit; 0 for those that are not movable.
    What has no noise, or more than a number holds, has no say."""
    count, most = len(limits), limits[movable].log2().float()
    noises = [_layer(each) for each in model.layers if _has(each.up, movable) or _has(each.down, movable)]
    noises += [_tensor(each) for each in model.tensors if _has(each.classes, movable)]
    found = torch.zeros(count, dtype=torch.float64)
    first = [float(noise(torch.zeros(count + 1), SHARPNESS[-1])) for noise in noises]
    known = [(noise, size) for noise, size in zip(noises, first, strict=True) if 0 < size < math.inf]
    if not known or not len(movable):
        return found
    noises, first = [noise for noise, _ in known], [size for _, size in known]
    free = torch.zeros(len(movable), dtype=torch.float32, requires_grad=True)

    def logarithms() -> Tensor:
        return torch.zeros(count + 1).index_put((movable,), torch.minimum(free, most))

    whole = sum(first)
    for sharpness in SHARPNESS:
        search = torch.optim.LBFGS([free], max_iter=STEPS, history_size=12, line_search_fn="strong_wolfe")

        def closure(sharpness: float = sharpness, search: torch.optim.LBFGS = search) -> Tensor:
            search.zero_grad()
            theta = logarithms()
            total = torch.stack([noise(theta, sharpness) for noise in noises]).sum() / whole
            loss = total.log() + PULL * free.square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        search.step(closure)  # type: ignore[no-untyped-call]
    best = torch.minimum(free.detach(), most).double().clamp(-REACH, REACH)
    if bool(best.isfinite().all()):
        found[movable] = best
    return found


def _has(classes: Tensor, movable: Tensor) -> bool:
    return bool(torch.isin(classes, movable).any())


def _layer(layer: LayerNoise) -> Noise:
    """Rounding of weights: steps are as wide as the largest of those that share them."""
    weight, share = layer.weight, layer.spec.granularity
    energy = layer.objective.fit.products.diagonal(dim1=1, dim2=2).unsqueeze(1)
    count = layer.rows.as_weight(energy * layer.value.unsqueeze(2), weight.shape)
    size, up, down = weight.abs(), layer.up, layer.down
    if weight.dim() > 2 and not isinstance(share, PerGroup):  # the taps of a kernel have the same factors
        size, count = size.flatten(2).amax(2), count.flatten(2).sum(2)
        up, down = up.flatten(2)[:, :, 0], down.flatten(2)[:, :, 0]
    ends, counts, ups, downs = (as_rows(each, share) for each in (size.log2().clamp(min=-60), count.float(), up, down))
    unit = (2 / (layer.spec.levels - 1)) ** 2 / 12

    def noise(theta: Tensor, sharpness: float) -> Tensor:
        moved = theta[ups] - theta[downs]
        steps = _maximum(ends + moved, sharpness)
        return unit * (torch.exp2(2 * steps) * (counts * torch.exp2(-2 * moved)).sum(1)).sum()

    return noise


def _tensor(tensor: TensorNoise) -> Noise:
    """Rounding of activations: steps are as wide as the widest range of a channel."""
    low, high = tensor.ends(is_fit=True)
    classes, value, levels = tensor.classes, tensor.value.float(), tensor.spec.levels - 1
    ends = [torch.maximum(high, -low)] if tensor.spec.scheme is not Scheme.AFFINE else [high, -low]
    logs = [end.float().log2().clamp(min=-60) for end in ends if bool((end > 0).any())]
    unit = (2 / len(ends) / levels) ** 2 / 12

    def noise(theta: Tensor, sharpness: float) -> Tensor:
        own = theta[classes]
        if not logs:
            return own.sum() * 0
        width = sum((torch.exp2(_maximum((log + own).unsqueeze(0), sharpness)) for log in logs), torch.zeros(1))
        return (unit * width.square() * (value * torch.exp2(-2 * own)).sum()).sum()

    return noise


def _maximum(rows: Tensor, sharpness: float) -> Tensor:
    """The largest element of each row, smoothed."""
    scale = sharpness * 0.6931471805599453
    return torch.logsumexp(rows * scale, 1) / scale
