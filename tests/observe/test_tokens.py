"""Counts of indices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.errors import LoadError
from quantc.observe.tokens import Tokens
from quantc.spec.observation import State
from tests.support.laws import law
from tests.support.statistics import bits_of


def counted(parts: list[list[int]]) -> Tokens:
    found = Tokens.empty({})
    for number, part in enumerate(parts):
        found.update(torch.tensor(part, dtype=torch.int64).reshape(1, -1), batch=number)
    return found


@law(60)
@given(st.lists(st.lists(st.integers(0, 40)), max_size=5), st.lists(st.lists(st.integers(0, 40)), max_size=5))
def test_counts_are_those_of_numpy_in_any_split(left: list[list[int]], right: list[list[int]]) -> None:
    found = counted(left + right)
    assert found.counts.tolist() == np.bincount(np.array([*itertools.chain(*left, *right)], dtype=np.int64)).tolist()
    assert found.seen == sum(map(len, left + right))
    assert (
        bits_of(counted(left).merge(counted(right))) == bits_of(counted(right).merge(counted(left))) == bits_of(found)
    )
    assert bits_of(Tokens.from_state(found.to_state())) == bits_of(found)


def test_damaged_states() -> None:
    for counts in (torch.tensor([1, -1]), torch.tensor([1, 0]), torch.tensor([[1]]), torch.tensor([1.0])):
        with pytest.raises(LoadError, match="counts"):
            Tokens.from_state(State({"counts": counts}, {}))
