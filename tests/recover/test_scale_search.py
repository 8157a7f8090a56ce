"""Scales by the weighted error of weights."""

from __future__ import annotations

import pytest
import torch

from quantc.recover.fitting import Proposal
from quantc.recover.scale_search import rescaled
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor
from quantc.spec.granularity import Share, as_rows
from quantc.spec.numerics import fake_quantize, qparams_from_range
from quantc.spec.spec import INT8_WEIGHT
from tests.support.recovery import layer_of, linear_case

SHARES: list[Share] = [PerTensor(), PerChannel(axis=0), PerGroup(axis=1, size=8)]


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_no_range_of_a_finer_search_is_much_better(share: Share, bits: int) -> None:
    spec = INT8_WEIGHT.but(dtype=DType(f"int{bits}"), granularity=share)
    layer = layer_of(linear_case(spec).prepared())
    found = rescaled(layer)
    assert isinstance(found, Proposal)
    energy = layer.objective.fit.products.diagonal(dim1=1, dim2=2)[0]

    def errors(weight: torch.Tensor) -> torch.Tensor:
        return as_rows((layer.weight - weight).double().square() * energy, share).sum(1)

    assert torch.equal(found.weight, fake_quantize(layer.weight, found.qparams, spec))
    assert bool((errors(found.weight) <= errors(layer.current)).all())
    rows = as_rows(layer.weight, share)
    shape = layer.qparams.scale.shape
    low, high = (x.reshape(shape) for x in (rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)))
    best = torch.full((len(rows),), torch.inf, dtype=torch.float64)
    for part in torch.linspace(0.2, 1.0, 400).tolist():
        tried = fake_quantize(layer.weight, qparams_from_range(low * part, high * part, spec), spec)
        best = torch.minimum(best, errors(tried))
    assert float(errors(found.weight).sum()) <= 1.1 * float(best.sum())
