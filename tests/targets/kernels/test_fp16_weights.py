"""Weights that float16 represents exactly, up to one factor per output."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from quantc.targets.kernels import fp16_weights
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


def test_integers_keep_the_scale_of_their_row_as_the_factor() -> None:
    levels = torch.tensor([[-128, 0, 127], [1, 2, 3]], dtype=torch.int8)
    scale = torch.tensor([0.1, 3.0])
    halves = exact_halves(StoredWeight(levels, scale, None, 0, None))
    assert halves is not None
    assert halves.factor is not None
    # a power of two next to the scale goes into the matrix, so that sums are of the size of the weights' own
    assert halves.matrix.tolist() == [[-8.0, 0.0, 7.9375], [2.0, 4.0, 6.0]]
    assert halves.factor.tolist() == (scale * torch.tensor([16.0, 0.5])).tolist()


def test_what_float16_holds_already_has_no_factor() -> None:
    weight = torch.tensor([[0.5, -2.0], [65504.0, 2.0**-24]])
    halves = exact_halves(StoredWeight(weight, None, None, None, None))
    assert halves is not None
    assert halves.factor is None
    assert torch.equal(halves.matrix, weight)


def test_rows_beyond_the_range_of_float16_are_brought_into_it() -> None:
    weight = torch.tensor([[2.0**40, 3 * 2.0**38], [0.0, 0.0], [2.0**-60, -(2.0**-61)]])
    halves = exact_halves(StoredWeight(weight, None, None, None, None))
    assert halves is not None
    assert halves.factor is not None
    assert bool(halves.matrix.half().isfinite().all())
    assert torch.equal(halves.matrix * halves.factor[:, None], weight)


@pytest.mark.parametrize(
    "weight", [torch.tensor([[1.0, 2049.0]]), torch.tensor([[1 / 3]]), torch.tensor([[1e30, 1.0]])]
)
def test_numbers_with_more_bits_than_float16_are_not_exact(weight: Tensor) -> None:
    stored = StoredWeight(weight, None, None, None, None)
    assert exact_halves(stored) is None
    assert not are_exact(stored)


def test_many_rows_are_looked_at_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight = StoredWeight(torch.randint(-128, 128, (7, 5), dtype=torch.int8), torch.rand(7) + 0.1, None, 0, None)
    whole = exact_halves(weight)
    monkeypatch.setattr(fp16_weights, "BLOCK", 10)
    parts = exact_halves(weight)
    assert whole is not None
    assert parts is not None
    assert torch.equal(whole.matrix, parts.matrix)
    assert torch.equal(cast("Tensor", whole.factor), cast("Tensor", parts.factor))
