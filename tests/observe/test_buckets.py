"""Buckets by the top bits of a float32: every number in one, in order, and cells that end where the data does."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from quantc.observe import buckets
from quantc.observe.buckets import BUCKETS, HALF, bucket_of, cells_of, count_buckets, edges, is_finite_bucket
from tests.support.specs import families


def test_every_float_lies_between_the_edges_of_its_bucket() -> None:
    generator = torch.Generator().manual_seed(4)
    bits = torch.randint(-(2**31), 2**31 - 1, (50_000,), generator=generator).to(torch.int32)
    x = bits.view(torch.float32)
    x = x[torch.isfinite(x)]
    buckets = bucket_of(x).numpy()
    magnitude = x.double().abs().numpy()
    index = buckets % HALF
    assert ((buckets >= HALF) == ~x.signbit().numpy()).all()
    assert (edges()[index] <= magnitude).all()
    assert (magnitude < edges()[index + 1]).all()
    normal = index >= 64
    assert (edges()[index + 1][normal] <= edges()[index][normal] * (1 + 1 / 64)).all()


def _counted(x: Tensor, *, is_positive: bool) -> dict[int, int]:
    hit, counts = count_buckets(x, is_positive=is_positive)
    assert bool((hit.diff() > 0).all())
    return dict(zip(hit.tolist(), counts.tolist(), strict=True))


def test_larger_magnitudes_of_a_sign_lie_in_later_buckets() -> None:
    x = torch.tensor([0.0, 1.5e-38, 1e-20, 0.99, 1.0, 1.5, 3e38, math.inf])
    positive, negative = bucket_of(x), bucket_of(-x)
    assert positive.tolist() == sorted(set(positive.tolist()))
    assert torch.equal(positive - HALF, negative)
    assert int(negative[0]) == 0
    assert bool((positive < BUCKETS).all())


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_each_element_is_counted_once_in_chunks_of_any_size(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "CHUNK", chunk)
    for x in families(torch.Generator().manual_seed(0), 10, 50):
        assert _counted(x, is_positive=False) == Counter(bucket_of(x).tolist())


def test_a_promise_of_no_negative_numbers_changes_no_count() -> None:
    positive = torch.tensor([0.0, 0.5, 0.5, 7.0])
    assert _counted(positive, is_positive=True) == _counted(positive, is_positive=False)
    with_minus_zero = torch.tensor([0.0, -0.0, 7.0])  # not below zero, and yet in the lower half
    assert _counted(with_minus_zero, is_positive=True) == _counted(with_minus_zero, is_positive=False)
    assert _counted(with_minus_zero, is_positive=True)[0] == 1


def test_buckets_of_nan_and_infinity_are_told_from_those_of_the_largest_numbers() -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([largest, -largest, 0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])
    assert is_finite_bucket(bucket_of(x)).tolist() == [True] * 4 + [False] * 4


def test_cells_ascend_without_overlap_and_end_at_the_extremes() -> None:
    x = torch.tensor([-3.0, -1.01, -1e-42, 0.0, 0.3, 0.3001, 2.9])
    hit, counts = count_buckets(x, is_positive=False)
    cells = cells_of(hit, counts, -3.0, float(x[-1]))
    assert (cells.low, cells.high) == (-3.0, float(x[-1]))
    assert (cells.left <= cells.right).all()
    assert (cells.right[:-1] <= cells.left[1:]).all()
    assert cells.mass.tolist() == [1, 1, 1, 1, 2, 1]  # 0.3 and 0.3001 share one
    assert cells.is_tiny.tolist() == [False, False, True, True, False, False]
    for value in x.tolist():
        assert ((cells.left <= value) & (value <= cells.right)).any()


def test_cells_have_middles_and_can_be_selected() -> None:
    hit, counts = count_buckets(torch.tensor([-2.0, -2.0, 4.0]), is_positive=False)
    cells = cells_of(hit, counts, -2.0, 4.0)
    negative = cells.only(cells.middle < 0)
    assert negative.mass.tolist() == [2]
    assert negative.high < 0
    assert np.allclose(cells.magnitude, [2, 4], rtol=1 / 64)


def test_buckets_without_counts_make_no_cell() -> None:
    hit, counts = bucket_of(torch.tensor([1.0, 2.0, 3.0])).long(), torch.tensor([4, 0, 5])
    assert cells_of(hit, counts, 1.0, 3.0).mass.tolist() == [4, 5]
