"""Proposals of rounded weights and of corrected biases for one layer."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from quantc.recover.fitting import Proposal, by_set, mixed, scale_sets
from quantc.recover.layers import Layer
from quantc.recover.objective import damped
from quantc.recover.rounding import Columns, by_coordinate, with_feedback
from quantc.recover.scale_refit import refit
from quantc.spec.numerics import QParams

Method = Literal["gptq", "coordinate"]
FEW_LEVELS = 32
TURNS = 2


def rounded(layer: Layer, method: Method, frees_bias: bool) -> Proposal:
    """Weights rounded to the layer's grid so that its output changes least, on the half they are fitted to."""
    moments, is_free = layer.objective.fit, frees_bias and layer.bias is not None
    products = moments.about_mean() if is_free else moments.products
    order = products.diagonal(dim1=1, dim2=2).sum(0).argsort(descending=True, stable=True).tolist()
    matrix, unit, share = damped(products[:, order][:, :, order], moments.rows)
    weights = layer.rows(layer.weight.double())

    def rounded_on(qparams: QParams) -> Proposal:
        columns = Columns(weights, layer.grid(qparams), order)
        if method == "gptq":
            with_feedback(columns, unit)
        else:
            columns.start(layer.levels(layer.current, qparams))
        by_coordinate(columns, matrix)
        levels = columns.result()
        if layer.spec.levels <= FEW_LEVELS and layer.limit is None:
            levels, qparams = _alternated(layer, levels, qparams, matrix, order)
        weight = layer.weight_at(levels, qparams)
        return Proposal(weight, qparams, _shift(layer, weight) if is_free else layer.shift, _note(layer, share))

    proposal = rounded_on(layer.qparams)
    if method == "gptq" and not layer.open_qparams.equals(layer.qparams):
        proposal = _better(layer, proposal, rounded_on(layer.open_qparams))
    return proposal


def _alternated(
    layer: Layer, levels: Tensor, qparams: QParams, products: Tensor, order: list[int]
) -> tuple[Tensor, QParams]:
    """Levels and scales fitted in turn, each to the other: where levels are few, scales matter."""
    weights = layer.rows(layer.weight.double())
    for _ in range(TURNS):
        found = refit(layer, levels, qparams, products, order)
        if found is None:
            break
        qparams = found
        columns = Columns(weights, layer.grid(qparams), order)
        columns.start(levels)
        by_coordinate(columns, products, sweeps=1)
        levels = columns.result()
    return levels, qparams


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
    return Proposal(layer.current, layer.qparams, _shift(layer, layer.current))


def _shift(layer: Layer, weight: Tensor) -> Tensor:
    return layer.objective.fit.drift(layer.rows(layer.weight.double() - weight.double()))
