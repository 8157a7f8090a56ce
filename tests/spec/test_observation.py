"""What observations have in common: a state to save, and the checks before qparams are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.observe.minmax import MinMax
from quantc.observe.moving_average import MovingAverage
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.observation import (
    Observation,
    Order,
    State,
    check_mergeable,
    check_spec,
    no_options,
    refuse_empty,
)
from quantc.spec.spec import INT8, INT8_WEIGHT


def minmax(*values: float) -> MinMax:
    made = MinMax.empty(PerTensor(), {})
    if values:
        made.update(torch.tensor(values))
    return made


def test_tensors_of_a_state_have_the_dtype_and_shape_asked_for() -> None:
    state = State({"low": torch.zeros(2)})
    assert torch.equal(state.tensor("low", torch.float32, torch.Size([2])), torch.zeros(2))
    assert state.tensor("low", torch.float32) is state.tensors["low"]
    with pytest.raises(LoadError, match="'high'"):
        state.tensor("high", torch.float32)
    with pytest.raises(LoadError, match=r"'low' is torch.float32\[2\], not torch.float64"):
        state.tensor("low", torch.float64)
    with pytest.raises(LoadError, match=r"not torch.float32\[3\]"):
        state.tensor("low", torch.float32, torch.Size([3]))


def test_counts_and_numbers_of_a_state_are_of_their_kind() -> None:
    state = State(values={"seen": 3, "rate": 0.5, "whole": 2, "flag": True, "less": -1, "text": "3"})
    assert (state.count("seen"), state.number("rate"), state.number("whole")) == (3, 0.5, 2.0)
    for name in ("flag", "less", "text", "rate", "missing"):
        with pytest.raises(LoadError, match=repr(name)):
            state.count(name)
    for name in ("flag", "text", "missing"):
        with pytest.raises(LoadError, match=repr(name)):
            state.number(name)


def test_a_class_with_the_members_is_an_observation_without_a_base() -> None:
    assert isinstance(minmax(), Observation)
    assert not isinstance(State(), Observation)
    assert (MinMax.order, MovingAverage.order) == (Order.FREE, Order.MATTERS)


def test_options_of_an_observation_without_any_are_refused_by_name() -> None:
    no_options("minmax", {})
    with pytest.raises(SpecError, match="minmax has no option 'rate'"):
        no_options("minmax", {"rate": 0.5})


def test_there_are_no_qparams_of_nothing_or_of_what_is_no_number() -> None:
    refuse_empty(minmax(1.0), "linear:out0")
    with pytest.raises(ObservationError, match="nothing") as caught:
        refuse_empty(minmax(), "linear:out0")
    assert caught.value.where == "linear:out0"
    with pytest.raises(DataError, match="2 of 3"):
        refuse_empty(minmax(1.0, torch.nan, torch.inf), "")


def test_only_statistics_of_one_kind_and_granularity_are_merged() -> None:
    check_mergeable(minmax(1.0), minmax())
    others: list[Any] = [MinMax.empty(PerChannel(axis=0), {}), MovingAverage.empty(PerTensor(), {})]
    for other in others:
        with pytest.raises(ObservationError, match=f"minmax per-tensor .* {other.statistics}"):
            check_mergeable(minmax(), other)


def test_statistics_have_the_granularity_of_the_spec() -> None:
    check_spec(minmax(), INT8, "")
    with pytest.raises(ObservationError, match=r"per-tensor .* per-channel\(axis=0\)"):
        check_spec(minmax(), INT8_WEIGHT, "linear:in1")
