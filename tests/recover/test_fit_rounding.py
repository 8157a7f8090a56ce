"""Proposals of rounded weights and corrected biases."""

from __future__ import annotations

import pytest
import torch

from quantc.recover.fit_rounding import corrected, rounded
from quantc.recover.layers import Layer
from quantc.recover.objective import damped
from quantc.recover.rounding import Grid
from quantc.spec.formats import DType, PerChannel, PerGroup, PerTensor
from quantc.spec.granularity import Share
from quantc.spec.numerics import fake_quantize
from quantc.spec.spec import INT8_WEIGHT
from tests.support.recovery import by_inverses, layer_of, linear_case

SHARES: list[Share] = [PerTensor(), PerChannel(axis=0), PerGroup(axis=1, size=8)]


def fit_error(layer: Layer, weight: torch.Tensor, shift: torch.Tensor | None) -> float:
    return float(layer.objective.fit.error(layer.rows(layer.weight.double() - weight.double()), shift).sum())


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_rounding_lowers_the_error_and_stays_on_its_grid(bits: int, share: Share) -> None:
    layer = layer_of(linear_case(INT8_WEIGHT.but(dtype=DType(f"int{bits}"), granularity=share)).prepared())
    for method in ("gptq", "coordinate"):
        for frees_bias in (True, False):
            found = rounded(layer, "gptq" if method == "gptq" else "coordinate", frees_bias)
            assert torch.equal(fake_quantize(found.weight, found.qparams, layer.spec), found.weight)
            assert (found.shift is not None) is frees_bias
            assert fit_error(layer, found.weight, found.shift) < fit_error(layer, layer.current, None)


def test_a_free_bias_loses_less() -> None:
    layer = layer_of(linear_case().prepared())
    free, kept = (rounded(layer, "gptq", frees_bias) for frees_bias in (True, False))
    assert fit_error(layer, free.weight, free.shift) < fit_error(layer, kept.weight, kept.shift)


def test_a_bias_takes_up_the_mean() -> None:
    layer = layer_of(linear_case().prepared())
    found = corrected(layer)
    assert not isinstance(found, str)
    assert found.shift is not None
    assert torch.equal(found.weight, layer.current)
    best = fit_error(layer, found.weight, found.shift)
    for nudge in (-1e-3, 1e-3):
        assert best < fit_error(layer, found.weight, found.shift + nudge)
    assert corrected(layer_of(linear_case(bias=False).prepared())) == "it has no bias of its own"


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_scales_of_its_own_lose_less_than_those_of_the_range(bits: int) -> None:
    """By the published form of feedback, with inverses, on the scales of the range."""
    spec = INT8_WEIGHT.but(dtype=DType(f"int{bits}"), granularity=PerGroup(axis=1, size=8), scheme="affine")
    layer = layer_of(linear_case(spec).prepared())
    order = layer.objective.fit.about_mean().diagonal(dim1=1, dim2=2)[0].argsort(descending=True).tolist()
    matrix, _, _ = damped(layer.objective.fit.about_mean()[:, order][:, :, order], layer.objective.fit.rows)
    grid = layer.grid(layer.qparams)
    ordered = Grid(grid.scale[..., order], grid.zero_point[..., order], grid.qmin, grid.qmax)
    levels = torch.empty_like(grid.scale)
    levels[..., order] = by_inverses(layer.rows(layer.weight.double())[..., order], matrix, ordered)
    plain = layer.weight_at(levels, layer.qparams)
    shift = layer.objective.fit.drift(layer.rows(layer.weight.double() - plain.double()))
    found = rounded(layer, "gptq", frees_bias=True)
    assert fit_error(layer, found.weight, found.shift) < fit_error(layer, plain, shift)
