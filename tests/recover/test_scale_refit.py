"""Scales for given levels, against least squares of torch on rows."""

from __future__ import annotations

import pytest
import torch

from quantc.recover.scale_refit import refit
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor
from quantc.spec.granularity import Share
from quantc.spec.spec import INT8_WEIGHT
from tests.support.recovery import layer_of, linear_case

INT3 = INT8_WEIGHT.but(dtype=DType.INT3)


@pytest.mark.parametrize("share", [PerChannel(axis=0), PerGroup(axis=1, size=8)], ids=str)
def test_scales_are_those_of_least_squares(share: Share) -> None:
    case = linear_case(INT3.but(granularity=share))
    layer = layer_of(case.prepared())
    width = layer.input.width
    order = list(range(width))[::-1]
    products = layer.objective.fit.products[:, order][:, :, order]
    levels = layer.levels(layer.current, layer.qparams)
    found = refit(layer, levels, layer.qparams, products, order)
    assert found is not None
    rows = torch.cat(case.batches[::2]).double()
    size = share.size if isinstance(share, PerGroup) else width
    for output in range(6):
        parts = (rows * levels[0, output]).reshape(len(rows), -1, size).sum(2)
        wanted = rows @ layer.weight[output].double()
        expected = torch.linalg.lstsq(parts, wanted.unsqueeze(1)).solution[:, 0]
        first = layer.qparams.scale.reshape(6, -1)[output].double()
        inner = (expected > first / 2) & (expected < first * 2)
        if bool(inner.all()):
            torch.testing.assert_close(found.scale.reshape(6, -1)[output].double(), expected, rtol=2e-3, atol=0)
    before, after = (
        layer.objective.fit.error(layer.rows(layer.weight.double() - layer.weight_at(levels, each).double())).sum()
        for each in (layer.qparams, found)
    )
    assert float(after) < float(before)


def test_scales_that_outputs_share_stay() -> None:
    for share in (PerTensor(), PerChannel(axis=1)):
        layer = layer_of(linear_case(INT3.but(granularity=share)).prepared())
        levels = layer.levels(layer.current, layer.qparams)
        order = list(range(layer.input.width))
        assert refit(layer, levels, layer.qparams, layer.objective.fit.products, order) is None
