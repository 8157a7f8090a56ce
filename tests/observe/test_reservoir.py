"""Reservoirs: the rows of the smallest hashes, a uniform sample."""

from __future__ import annotations

import pytest
import torch

from quantc.errors import LoadError, SpecError
from quantc.observe.reservoir import Reservoir, row_keys
from quantc.spec.observation import State
from tests.support.statistics import bits_of, statistic


def test_it_keeps_the_rows_of_the_smallest_keys() -> None:
    data = [(n, torch.randn(1, 50, 3)) for n in range(4)]
    found = statistic("reservoir", data)
    assert isinstance(found, Reservoir)
    keys = torch.cat([row_keys(n, 50) for n, _ in data])
    rows = torch.cat([x for _, x in data], dim=1)
    assert found.rows is not None
    assert torch.equal(found.rows, rows[:, keys.argsort()[:5]])
    assert (found.seen, found.rows.shape[1]) == (200, 5)


def test_keys_are_distinct_and_uniform() -> None:
    keys = torch.cat([row_keys(n, 1000) for n in range(50)])
    assert len(set(keys.tolist())) == len(keys)
    assert bool((keys >= 0).all())
    shares = torch.histc(keys.double() / 2.0**63, 10, 0, 1) / len(keys)
    assert bool((shares - 0.1).abs().max() < 0.01)


def test_batches_numbered_alike_in_two_places_commute() -> None:
    left, right = (statistic("reservoir", [(0, torch.randn(1, 9, 3))]) for _ in range(2))
    assert bits_of(left.merge(right)) == bits_of(right.merge(left))


def test_refusals() -> None:
    with pytest.raises(SpecError, match="it has: rows"):
        Reservoir.empty({"size": 3})
    with pytest.raises(SpecError, match="at least 1"):
        Reservoir.empty({"rows": 0})
    with pytest.raises(SpecError, match="of 3 and of 4 rows"):
        Reservoir(3).merge(Reservoir(4))
    state = statistic("reservoir", [(0, torch.randn(1, 9, 3))]).to_state()
    for damaged in ({"keys": state.tensors["keys"].flip(0)}, {"rows": state.tensors["rows"][:, 1:]}):
        with pytest.raises(LoadError, match="keys"):
            Reservoir.from_state(State({**state.tensors, **damaged}, state.values))
