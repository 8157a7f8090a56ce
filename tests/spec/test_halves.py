"""Halves: even and odd batches apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.errors import LoadError
from quantc.observe.gram import Gram
from quantc.observe.moments import Moments
from quantc.spec.halves import Halves
from quantc.spec.observation import State
from quantc.spec.statistic import Permutation, Rotation
from tests.support.laws import law
from tests.support.statistics import Batch, batches, bits_of, statistic


def halves(data: list[Batch]) -> Halves:
    found = Halves.empty(Gram, {})
    for number, rows in data:
        found.update(rows, batch=number)
    return found


@law(40)
@given(batches(), st.integers(1, 4))
def test_each_half_is_the_statistic_of_its_batches(data: list[Batch], shards: int) -> None:
    whole = halves(data)
    assert bits_of(whole.even) == bits_of(statistic("gram", data[::2]))
    assert bits_of(whole.odd) == bits_of(statistic("gram", data[1::2]))
    assert bits_of(whole.whole()) == bits_of(statistic("gram", data))
    merged = halves(data[::shards])
    for index in range(1, shards):
        merged = halves(data[index::shards]).merge(merged)
    assert merged.to_state().values == whole.to_state().values
    assert bits_of(merged.even) == bits_of(whole.even)
    restored = Halves.from_state(Gram, whole.to_state())
    assert bits_of(restored.odd) == bits_of(whole.odd)


def test_a_change_carries_both_halves_or_none() -> None:
    data = [(n, torch.randn(1, 5, 4)) for n in range(2)]
    assert halves(data).carried(Permutation(torch.tensor([3, 1, 0, 2]))) is not None
    moments = Halves.empty(Moments, {})
    for number, rows in data:
        moments.update(rows, batch=number)
    assert moments.carried(Rotation(torch.eye(4))) is None


def test_damaged_states_name_the_half() -> None:
    state = halves([(0, torch.randn(1, 5, 4)), (1, torch.randn(1, 5, 4))]).to_state()
    with pytest.raises(LoadError, match="'odd'"):
        Halves.from_state(Gram, State(state.tensors, {"even": state.values["even"]}))
    without = {name: x for name, x in state.tensors.items() if name != "odd.upper"}
    with pytest.raises(LoadError, match="the odd half: the tensor 'upper'"):
        Halves.from_state(Gram, State(without, state.values))
