"""Sets of elements that share a scale: each way of looking at them finds the same sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.errors import DataError
from quantc.spec.formats import PerChannel, PerGroup, PerTensor, PerToken
from quantc.spec.granularity import (
    Share,
    as_rows,
    extremes,
    group_view,
    in_memory_order,
    normal_axis,
    shared_shape,
)

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
SHARES: list[Share] = [
    PerTensor(),
    PerChannel(axis=0),
    PerChannel(axis=-2),
    PerGroup(axis=1, size=3),
    PerGroup(axis=-1, size=4),
    PerGroup(axis=0, size=2),
    PerToken(),
]


@pytest.mark.parametrize("share", SHARES, ids=str)
def test_rows_extremes_and_shapes_agree(share: Share) -> None:
    rows = as_rows(X, share)
    low, high = extremes(X, share)
    shape = shared_shape(X.shape, share)
    assert rows.numel() == X.numel()
    assert low.shape == high.shape == shape
    assert len(rows) == shape.numel()
    assert torch.equal(low.flatten(), rows.amin(1))
    assert torch.equal(high.flatten(), rows.amax(1))


def test_rows_are_written_out() -> None:
    x = torch.arange(8).reshape(2, 4)
    assert as_rows(x, PerTensor()).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert as_rows(x, PerChannel(axis=1)).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert as_rows(x, PerGroup(axis=1, size=2)).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert as_rows(x, PerGroup(axis=0, size=2)).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert as_rows(x, PerToken()).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_vector_has_one_element_a_channel() -> None:
    x = torch.tensor([3.0, -1.0])
    low, high = extremes(x, PerChannel(axis=0))
    assert (low.tolist(), high.tolist()) == ([3.0, -1.0], [3.0, -1.0])


def test_nan_reaches_the_extremes_of_its_set_alone() -> None:
    x = X.clone()
    x[1, 2, 3] = torch.nan
    for share in (PerTensor(), PerChannel(axis=0), PerToken()):
        for found in extremes(x, share):
            assert int(found.isnan().sum()) == 1
    assert extremes(x, PerChannel(axis=0))[0].isnan().tolist() == [False, True, False, False]


@given(st.permutations([0, 1, 2]))
def test_memory_order_of_a_permuted_tensor_is_a_view_of_all_its_elements(order: list[int]) -> None:
    x = X.permute(order)
    flat = in_memory_order(x)
    assert flat.data_ptr() == X.data_ptr()
    assert torch.equal(flat, X.flatten())


def test_memory_order_of_parts_keeps_the_elements() -> None:
    part = X[:, ::2, 1:5].transpose(0, 2)
    assert sorted(in_memory_order(part).tolist()) == sorted(part.flatten().tolist())


def test_a_view_of_groups_splits_the_axis() -> None:
    view, axis = group_view(X, PerGroup(axis=-2, size=2))
    assert (tuple(view.shape), axis) == ((4, 3, 2, 8), 2)
    assert torch.equal(view.flatten(1, 2), X)


def test_axes_count_from_either_end_and_others_are_refused() -> None:
    assert [normal_axis(axis, 3) for axis in (-3, -1, 0, 2)] == [0, 2, 0, 2]
    for axis, rank in ((3, 3), (-4, 3), (0, 0)):
        with pytest.raises(DataError, match=f"axis {axis}") as caught:
            normal_axis(axis, rank, where="linear:in1")
        assert caught.value.where == "linear:in1"


def test_groups_that_do_not_divide_the_axis_are_refused() -> None:
    for look in (lambda share: extremes(X, share), lambda share: shared_shape(X.shape, share)):
        with pytest.raises(DataError, match=r"groups of 4 .* 6 elements along axis 1"):
            look(PerGroup(axis=1, size=4))
    with pytest.raises(DataError, match="axis"):
        extremes(torch.tensor(1.0), PerToken())
