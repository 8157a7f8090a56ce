"""Ranges of channels: a monoid, and carried along."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.errors import LoadError, QuantcError
from quantc.observe.extremes import Extremes
from quantc.spec.observation import State
from quantc.spec.statistic import Permutation, Rotation, Scale


def seen(*rows: torch.Tensor) -> Extremes:
    found = Extremes.empty({})
    for each in rows:
        found.update(each)
    return found


def same(one: Extremes, other: Extremes) -> bool:
    states = one.to_state(), other.to_state()
    return states[0].values == states[1].values and all(
        torch.equal(x, states[1].tensors[name]) for name, x in states[0].tensors.items()
    )


@given(st.permutations(range(4)))
def test_any_order_and_any_split_give_the_same(order: list[int]) -> None:
    parts = [torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    whole = seen(torch.cat(parts, 1))
    merged = Extremes.empty({})
    for index in order:
        merged = merged.merge(seen(parts[index]))
    assert same(merged, whole)
    assert torch.equal(whole.low, torch.cat(parts, 1).amin(1))  # type: ignore[arg-type]
    assert same(Extremes.empty({}).merge(whole), whole)
    assert same(Extremes.from_state(whole.to_state()), whole)


def test_carried_is_what_would_be_seen() -> None:
    x, factors = torch.randn(1, 7, 4), torch.tensor([2.0, -0.5, 0.0, 1.0])
    index = torch.tensor([2, 0, 3, 1])
    scaled, moved = seen(x).carried(Scale(factors)), seen(x).carried(Permutation(index))
    assert scaled is not None
    assert moved is not None
    assert same(scaled, seen(x * factors))
    assert same(moved, seen(x[..., index]))
    assert seen(x).carried(Rotation(torch.eye(4))) is None
    assert seen(torch.randn(2, 3, 4)).carried(Permutation(index)) is None


def test_what_is_refused() -> None:
    with pytest.raises(QuantcError):
        Extremes.empty({"bits": 8})
    with pytest.raises(QuantcError):
        seen(torch.randn(1, 2, 3)).merge(seen(torch.randn(1, 2, 4)))
    state = seen(torch.randn(1, 2, 3)).to_state()
    turned = State({"low": state.tensors["high"] + 1, "high": state.tensors["low"]}, state.values)
    with pytest.raises(LoadError):
        Extremes.from_state(turned)
