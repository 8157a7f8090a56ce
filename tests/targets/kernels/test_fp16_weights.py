"""Weights that float16 represents exactly, up to one factor per output."""

from __future__ import annotations

import torch
from hypothesis import given, settings

from quantc.targets.kernels.fp16_weights import are_exact, exact_halves
from quantc.targets.kernels.stored_weight import StoredWeight
from tests.support.stored_weights import stored_weights


@settings(max_examples=150)
@given(stored_weights())
def test_halves_are_exactly_the_weights(weight: StoredWeight) -> None:
    assert are_exact(weight)
    halves = exact_halves(weight)
    assert halves is not None
    assert torch.equal(halves.matrix.half().float(), halves.matrix)
    # in float64, so that nothing is rounded
    levels, scale = weight.w.double(), weight.scale
    if weight.group_size is not None:
        assert scale is not None
        assert weight.zero_point is not None
        wide, zero = (part.double().repeat_interleave(weight.group_size, 1) for part in (scale, weight.zero_point))
        levels = (levels - zero) * wide
    else:
        offset = 0 if weight.zero_point is None else weight.zero_point.double().unsqueeze(1)
        factor = 1.0 if scale is None else scale.double().reshape(-1, 1)
        levels = (levels - offset) * factor
    factor = torch.ones(()) if halves.factor is None else halves.factor.unsqueeze(1)
    assert torch.equal(halves.matrix.double() * factor.double(), levels)


def test_groups_too_far_apart_are_not_exact() -> None:
    w = torch.full((128, 32), 3, dtype=torch.int8)
    scale = torch.tensor([[2.0**-30, 1.0]]).repeat(128, 1)
    assert exact_halves(StoredWeight(w, scale, None, None, 16)) is not None  # a power of two for all
    scale = torch.tensor([[101 * 2.0**-40, 101.0]]).repeat(128, 1)
    assert exact_halves(StoredWeight(w, scale, None, None, 16)) is None
