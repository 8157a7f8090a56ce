"""Qparams found by training: what was found is given, and nothing changes it."""

from __future__ import annotations

import math

import pytest
import torch

from quantc.errors import LoadError, ObservationError, SpecError
from quantc.observe import OBSERVATIONS, Order, State, start
from quantc.observe.trained import LEARNED, Lsq, LsqPlus, Trained
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.numerics import QParams
from quantc.spec.spec import INT8

CHANNELS = PerChannel(axis=0)


def trained() -> Trained:
    return Trained(CHANNELS, QParams(torch.tensor([0.5, 0.25]), torch.tensor([3, -4])))


def test_what_training_found_is_given() -> None:
    found = trained().qparams(INT8.but(granularity=CHANNELS))
    assert (found.scale.tolist(), found.zero_point.tolist()) == ([0.5, 0.25], [3, -4])
    with pytest.raises(ObservationError, match="per-tensor") as caught:
        trained().qparams(INT8, where="linear:in1")
    assert caught.value.where == "linear:in1"


def test_data_does_not_change_it() -> None:
    assert Trained.order is Order.MATTERS
    with pytest.raises(ObservationError, match="do not change with data") as caught:
        trained().update(torch.ones(2), where="relu:out0")
    assert caught.value.where == "relu:out0"
    with pytest.raises(ObservationError, match="do not change with data"):
        trained().merge(trained())


def test_no_spec_can_ask_for_it() -> None:
    with pytest.raises(SpecError, match="training"):
        Trained.empty(PerTensor(), {})


def test_it_is_read_back_as_it_was() -> None:
    again = Trained.from_state(CHANNELS, trained().to_state())
    assert again.share == CHANNELS
    assert again.found.equals(trained().found)
    assert again.seen == 1  # as though calibrated, so that converting takes it


@pytest.mark.parametrize("bad", [0.0, -0.5, math.nan, math.inf])
def test_scales_that_are_not_positive_numbers_are_refused(bad: float) -> None:
    state = State({"scale": torch.tensor([0.5, bad]), "zero_point": torch.tensor([0, 0])})
    with pytest.raises(LoadError, match="'scale'"):
        Trained.from_state(CHANNELS, state)


def test_a_zero_point_for_each_scale_is_required() -> None:
    state = State({"scale": torch.tensor([0.5, 0.5]), "zero_point": torch.tensor([0])})
    with pytest.raises(LoadError, match="'zero_point'"):
        Trained.from_state(CHANNELS, state)


def test_learned_scales_can_be_asked_for_and_name_themselves() -> None:
    assert [type(start(INT8.but(observe=name))) for name in LEARNED] == [Lsq, LsqPlus]
    assert [OBSERVATIONS[name] for name in LEARNED] == [Lsq, LsqPlus]
    with pytest.raises(ObservationError, match="lsq-plus"):
        start(INT8.but(observe="lsq")).merge(start(INT8.but(observe="lsq-plus")))  # nor are they one another
