"""Snapshots of tensors: writes are found by torch's counter, or by the numbers where nothing is counted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantc.capture.runtime.write_detection import Exact, Stamp, is_tracked, is_wrapped


def test_memory_that_others_can_write_to_is_not_tracked() -> None:
    assert is_tracked(torch.ones(2))
    assert is_tracked(torch.ones(2, device="meta"))
    assert is_tracked(torch.ones(2).to_sparse())
    shared = torch.from_numpy(torch.ones(2).numpy())
    assert not is_tracked(shared)
    with torch.inference_mode():
        assert not is_tracked(torch.ones(2))


@pytest.mark.parametrize("exact", list(Exact))
def test_a_write_ends_what_a_stamp_says(exact: Exact) -> None:
    x = torch.ones(3)
    stamp = Stamp(x, exact)
    found = [stamp.holds]
    x[1:].add_(1)  # through a view
    found.append(stamp.holds)
    stamp.renew()
    assert [*found, stamp.holds] == [True, False, True]


def test_writing_the_same_numbers_counts_unless_numbers_are_compared() -> None:
    x = torch.ones(3)
    counted, compared = Stamp(x, Exact.NO), Stamp(x, Exact.YES)
    x.fill_(1.0)
    assert not counted.holds
    assert compared.holds


def test_writes_past_the_counter_are_found_where_numbers_are_kept() -> None:
    x = torch.ones(3)
    array = x.numpy()
    blind = Stamp(torch.ones(3), Exact.NO)
    stamp = Stamp(x, Exact.NO)  # NumPy has the memory, so numbers are compared
    array[0] = 5
    assert not stamp.holds
    assert blind.holds


def test_a_tensor_is_watched_from_when_its_memory_is_exposed() -> None:
    x = torch.ones(3)
    stamp = Stamp(x, Exact.NO)
    assert stamp.copy is None
    stamp.watch()
    x.numpy()[0] = 5
    assert not stamp.holds


def test_nan_is_the_same_nan() -> None:
    x = torch.tensor([float("nan"), 1.0])
    stamp = Stamp(x, Exact.YES)
    assert stamp.holds
    x[1] = 2.0
    assert not stamp.holds


def test_sparse_tensors_are_compared_by_their_numbers() -> None:
    x = torch.eye(2).to_sparse()
    stamp = Stamp(x, Exact.YES)
    assert stamp.holds
    x.mul_(2)
    assert not stamp.holds


def test_memory_is_shared_with_views_and_not_with_copies() -> None:
    x = torch.ones(4)
    stamp = Stamp(x)
    assert stamp.shares_memory(x[2:])
    assert not stamp.shares_memory(x.clone())
    assert not stamp.shares_memory(x.to_sparse())


def test_wrappers_of_a_transform_have_no_memory_to_watch() -> None:
    found: list[bool] = []

    def body(row: Tensor) -> Tensor:
        stamp = Stamp(row)
        found.extend([is_wrapped(row), stamp.holds, stamp.shares_memory(row)])
        return row * 2

    torch.func.vmap(body)(torch.ones(2, 3))
    assert found == [True, True, False]
    assert not is_wrapped(torch.ones(2))
