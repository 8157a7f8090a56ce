"""Proposals of rounded weights and of corrected biases for one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from quantc.recover.fitting import Proposal, by_set, mixed, scale_sets
from quantc.recover.layers import Layer
from quantc.recover.objective import damped, remaining
from quantc.recover.rounding import SWEEPS, Columns, by_coordinate, with_feedback
from quantc.recover.scale_refit import refit
from quantc.recover.scale_search import searched
from quantc.spec.numerics import QParams

Method = Literal["gptq", "coordinate"]
FEW_LEVELS = 32
"""Up to so many, a sweep of polishing is enough."""
FEWEST_LEVELS = 8
"""Up to so many, scales are fitted to the levels that were found."""


def rounded(layer: Layer, method: Method, frees_bias: bool) -> Proposal:
    """Weights rounded so that the layer's output changes least, on the half they are fitted to: to the layer's grid, or with
    feedback to one of scales that lose less."""
    moments, is_free = layer.objective.fit, frees_bias and layer.bias is not None
    products = moments.about_mean() if is_free else moments.products
    order = products.diagonal(dim1=1, dim2=2).sum(0).argsort(descending=True, stable=True)
    matrix, unit, share = damped(products[:, order.unsqueeze(1), order], moments.rows)
    problem = _Problem(layer, layer.rows(layer.weight.double()), order.tolist(), matrix, unit)

    def proposed(levels: Tensor, qparams: QParams) -> Proposal:
        weight = layer.weight_at(levels, qparams)
        return Proposal(weight, qparams, _shift(layer, weight) if is_free else layer.shift, _note(layer, share))

    if method == "coordinate":
        return proposed(*problem.polished(layer.levels(layer.current, layer.qparams), layer.qparams))
    proposal = proposed(*problem.with_feedback(problem.own_scales()))
    if not layer.open_qparams.equals(layer.qparams):
        proposal = _better(layer, proposal, proposed(*problem.with_feedback(layer.open_qparams)))
    return proposal


@dataclass(frozen=True, slots=True, eq=False)
class _Problem:
    """Weights to round, and the products of what they meet, in an order of the inputs."""

    layer: Layer
    weights: Tensor
    order: list[int]
    matrix: Tensor
    unit: Tensor

    def own_scales(self) -> QParams:
        """Scales for rounding with feedback: an error counts by what the inputs after it cannot take up. Those that the
        layer has where sums are limited, as the limit came with them."""
        if self.layer.limit is not None:
            return self.layer.qparams
        energy = torch.empty_like(self.matrix[..., 0])
        energy[:, self.order] = remaining(self.matrix, self.unit)
        return searched(self.layer, energy)

    def with_feedback(self, qparams: QParams) -> tuple[Tensor, QParams]:
        """Levels, and scales. A fit that is to be judged is not polished: that lowers the error further where it is fitted."""
        columns = Columns(self.weights, self.layer.grid(qparams), self.order)
        with_feedback(columns, self.unit)
        is_few = self.layer.spec.levels <= FEW_LEVELS and self.layer.limit is None
        if is_few and self.layer.objective.fit is not self.layer.objective.judge:
            return columns.result(), qparams
        by_coordinate(columns, self.matrix, sweeps=1 if is_few else SWEEPS)
        levels = columns.result()
        if is_few and self.layer.spec.levels <= FEWEST_LEVELS:
            found = refit(self.layer, levels, qparams, self.matrix, self.order)
            return (levels, qparams) if found is None else self.polished(levels, found, sweeps=1)
        return levels, qparams

    def polished(self, levels: Tensor, qparams: QParams, sweeps: int = SWEEPS) -> tuple[Tensor, QParams]:
        columns = Columns(self.weights, self.layer.grid(qparams), self.order)
        columns.start(levels)
        by_coordinate(columns, self.matrix, sweeps=sweeps)
        return columns.result(), qparams


def _better(layer: Layer, one: Proposal, other: Proposal) -> Proposal:
    """For each output the better proposal on the half that they were fitted to."""
    errors = [
        layer.objective.fit.steady_error(layer.rows(layer.weight.double() - each.weight.double()), each.shift)
        for each in (one, other)
    ]
    sets = scale_sets(layer)
    old, new = (by_set(each, sets) for each in errors)
    return mixed(layer, one, other, (new < old)[sets])


def _note(layer: Layer, share: float) -> str:
    rows, width = layer.objective.fit.rows, layer.input.width
    few = f"{rows} rows for {width} inputs, " if rows < width else ""
    return f"{few}{share:.0%} of the mean added to the diagonal" if few or share > 0.01 else ""


def corrected(layer: Layer) -> Proposal | str:
    """The bias that takes up the mean change of the output."""
    if layer.bias is None:
        return "it has no bias of its own"
    shift = _shift(layer, layer.current)
    if layer.bias_step is not None:
        bias = layer.bias.double().reshape(shift.shape)
        shift = ((bias + shift) / layer.bias_step).round() * layer.bias_step - bias
    return Proposal(layer.current, layer.qparams, shift)


def _shift(layer: Layer, weight: Tensor) -> Tensor:
    return layer.objective.fit.drift(layer.rows(layer.weight.double() - weight.double()))
