"""Histograms over bit patterns: each element once, whatever its layout, and exact when merged or read back."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from torch import Tensor

from quantc.errors import DataError, LoadError, ObservationError
from quantc.observe import Histogram, State
from quantc.observe.buckets import bucket_of
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.numerics import qparams_of
from quantc.spec.spec import INT8
from tests.support.observations import bits_of, observed
from tests.support.specs import tensors


@given(tensors((40,)))
def test_the_histogram_counts_every_element_once(x: Tensor) -> None:
    histogram = Histogram()
    histogram.update(x)
    assert histogram.counts is not None
    assert histogram.columns is not None
    assert int(histogram.counts.sum()) == histogram.seen == x.numel()
    expected = Counter(bucket_of(x).tolist())
    assert dict(zip(histogram.columns.tolist(), histogram.counts[0].tolist(), strict=True)) == expected
    cells = histogram.cells()[0]
    assert (cells.low, cells.high) == (float(x.min()) + 0.0, float(x.max()) + 0.0)


def test_memory_layout_does_not_matter() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(5))
    forms = [x, x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2), x[:, :, ::2].repeat(1, 1, 1, 1)]
    first, *others = (bits_of(observed(INT8.but(observe="mse"), [form])) for form in forms[:3])
    assert all(other == first for other in others)
    assert observed(INT8.but(observe="mse"), [forms[3]]).seen == forms[3].numel()


def histogram_of(*batches: Tensor) -> Histogram:
    histogram = Histogram.empty(PerTensor(), {})
    for batch in batches:
        histogram.update(batch)
    return histogram


def counts_of(histogram: Histogram, row: int = 0) -> dict[int, int]:
    assert histogram.columns is not None
    assert histogram.counts is not None
    pairs = zip(histogram.columns.tolist(), histogram.counts[row].tolist(), strict=True)
    return {column: count for column, count in pairs if count}


def test_batches_that_hit_other_buckets_widen_the_columns() -> None:
    first, second = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([-8.0, 1.0, 100.0])
    expected = Counter(bucket_of(torch.cat([first, second])).tolist())
    assert counts_of(histogram_of(first, second)) == expected
    assert counts_of(histogram_of(first).merge(histogram_of(second))) == expected
    assert counts_of(histogram_of(first, first)) == {
        column: 2 * count for column, count in counts_of(histogram_of(first)).items()
    }


def test_merging_changes_neither_operand() -> None:
    left, right = histogram_of(torch.tensor([1.0, 2.0])), histogram_of(torch.tensor([2.0, 1.0]))
    before = bits_of(left), bits_of(right)
    merged = left.merge(right)
    merged.update(torch.ones(3))
    assert (bits_of(left), bits_of(right)) == before
    assert merged.seen == 7


def test_each_channel_has_a_row_of_its_own() -> None:
    x = torch.tensor([[1.0, 1.0, 4.0], [-2.0, 4.0, 4.0]])
    histogram = Histogram.empty(PerChannel(axis=0), {})
    histogram.update(x)
    for row in range(2):
        assert counts_of(histogram, row) == Counter(bucket_of(x[row]).tolist())
    assert [(cells.low, cells.high) for cells in histogram.cells()] == [(1.0, 4.0), (-2.0, 4.0)]


def test_the_range_of_a_sound_histogram_is_that_of_the_data_by_minmax() -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert histogram_of(x).qparams(INT8).equals(qparams_of(x, INT8))
    clipped = histogram_of(x).qparams(INT8.but(observe="percentile{percentile=90.0}"))
    assert float(clipped.scale) < float(qparams_of(x, INT8).scale)


def test_what_is_not_finite_is_counted_and_gives_no_cells() -> None:
    histogram = histogram_of(torch.tensor([1.0, math.nan, -math.inf]))
    assert (histogram.seen, histogram.non_finite) == (3, 2)
    with pytest.raises(DataError, match="2 of 3"):
        histogram.cells(where="softmax:out0")
    with pytest.raises(ObservationError, match="nothing was observed"):
        histogram_of(torch.zeros(0)).cells()


def test_a_state_whose_counts_are_not_the_data_s_is_refused() -> None:
    state = histogram_of(torch.tensor([1.0, 2.0])).to_state()
    for name, tensor, told in (
        ("counts", state.tensors["counts"] + 1, "'counts'"),
        ("columns", state.tensors["columns"].flip(0), "'columns'"),
        ("counts", state.tensors["counts"].float(), "'counts'"),
    ):
        with pytest.raises(LoadError, match=told):
            Histogram.from_state(PerTensor(), State({**state.tensors, name: tensor}, state.values))
    assert bits_of(Histogram.from_state(PerTensor(), state)) == bits_of(histogram_of(torch.tensor([2.0, 1.0])))
