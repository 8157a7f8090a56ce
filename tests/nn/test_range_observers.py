"""Observers that keep a range: the bits of torch's, on the same data; state dicts that load both ways."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import quantc.nn.fake_quantize as own_fakes
import quantc.nn.observers as own_observers
import quantc.nn.qconfig as own_qconfigs
from quantc.errors import DataError, SpecError
from tests.support.observer_cases import SCHEMES, batches, observers, same


@settings(max_examples=250)
@given(observers(), batches())
def test_the_same_data_gives_the_bits_of_torch(pair: tuple[Any, Any], data: list[Tensor]) -> None:
    mine, theirs = pair
    for batch in data:
        assert mine(batch) is batch
        theirs(batch)
    same(mine.calculate_qparams(), theirs.calculate_qparams())


@settings(max_examples=60)
@given(observers(), batches())
def test_state_dicts_load_both_ways(pair: tuple[Any, Any], data: list[Tensor]) -> None:
    mine, theirs = pair
    for batch in data:
        mine(batch)
    empty_of_torch = copy.deepcopy(theirs)
    empty_of_torch.load_state_dict(mine.state_dict())
    same(mine.calculate_qparams(), empty_of_torch.calculate_qparams())
    fresh = copy.deepcopy(pair[0])
    fresh.reset_min_max_vals()
    assert not fresh.has_seen
    for batch in data:
        theirs(batch)
    fresh.load_state_dict(theirs.state_dict())
    same(fresh.calculate_qparams(), theirs.calculate_qparams())


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_nan_is_refused_where_it_is_seen(name: str) -> None:
    observer = getattr(own_observers, name)()
    with pytest.raises(DataError, match="NaN"):
        observer(torch.tensor([[1.0, torch.nan]]))


def test_scales_of_nothing_are_warned_of() -> None:
    with pytest.warns(own_observers.UnobservedWarning, match="has seen no data"):
        scale, zero_point = own_observers.MinMaxObserver().calculate_qparams()
    assert (float(scale), int(zero_point)) == (1.0, 0)


@pytest.mark.parametrize(
    ("make", "keywords"),
    [
        (own_observers.MinMaxObserver, {"qscheme": torch.per_channel_affine}),
        (own_observers.PerChannelMinMaxObserver, {"qscheme": torch.per_tensor_affine}),
        (own_observers.PerChannelMinMaxObserver, {"is_dynamic": True}),
        (own_observers.HistogramObserver, {"is_dynamic": True}),
        (own_observers.MovingAverageMinMaxObserver, {"is_dynamic": True}),
        (own_observers.MinMaxObserver, {"dtype": torch.float64}),
        (own_observers.MinMaxObserver, {"quant_min": 3, "quant_max": 9}),
        (own_observers.MinMaxObserver, {"qscheme": torch.per_tensor_symmetric, "reduce_range": True}),
        (own_fakes.FakeQuantize, {"quant_min": -4, "quant_max": 300}),
        (own_fakes.FusedMovingAvgObsFakeQuantize, {"observer": own_observers.MinMaxObserver}),
        (own_fakes.FixedQParamsFakeQuantize, {"observer": own_observers.MinMaxObserver}),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        make(**keywords)


def test_no_module_of_the_vocabulary_needs_torch_s_quantization() -> None:
    for module in (own_observers, own_fakes, own_qconfigs):
        assert "torch.ao" not in inspect.getsource(module)
