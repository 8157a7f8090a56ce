"""Observers that keep a range: the bits of torch's, on the same data; state dicts that load both ways."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

import quantc.nn.observers as own_observers
from quantc.errors import DataError, ObservationError, SpecError
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
        (own_observers.MovingAverageMinMaxObserver, {"is_dynamic": True}),
        (own_observers.MinMaxObserver, {"dtype": torch.float64}),
        (own_observers.MinMaxObserver, {"quant_min": 3, "quant_max": 9}),
        (own_observers.MinMaxObserver, {"qscheme": torch.per_tensor_symmetric, "reduce_range": True}),
    ],
)
def test_ranges_that_make_no_sense_are_refused(make: Any, keywords: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        make(**keywords)


def test_a_moving_average_moves_by_its_constant_towards_each_batch() -> None:
    observer = own_observers.MovingAverageMinMaxObserver(averaging_constant=0.5)
    for high in (4.0, 8.0, 0.0):
        observer(torch.tensor([-high, high]))
    assert (float(observer.min_val), float(observer.max_val)) == (-3.0, 3.0)  # 4, then 6, then half of that


def test_empty_batches_say_nothing() -> None:
    for kind in (own_observers.MinMaxObserver, own_observers.PerChannelMinMaxObserver):
        observer = kind()
        observer(torch.empty(0, 3))
        assert not observer.has_seen


def test_an_axis_may_be_set_before_anything_was_seen() -> None:
    observer = own_observers.PerChannelMinMaxObserver()
    observer.ch_axis = 1
    observer(torch.tensor([[1.0, 2.0, 3.0], [-1.0, 0.0, 9.0]]))
    assert observer.max_val.tolist() == [1.0, 2.0, 9.0]
    assert observer.min_val.tolist() == [-1.0, 0.0, 3.0]


def test_files_of_older_versions_are_brought_up_to_date() -> None:
    """They have other names by channel, no eps, and one element where there is none now."""
    observer = own_observers.PerChannelMinMaxObserver()
    observer.load_state_dict({"min_vals": torch.tensor([-1.0, 0.0]), "max_vals": torch.tensor([1.0, 2.0])})
    assert observer.max_val.tolist() == [1.0, 2.0]
    whole = own_observers.MinMaxObserver()
    whole.load_state_dict({"min_val": torch.tensor([-1.0]), "max_val": torch.tensor([3.0])})
    assert (whole.min_val.dim(), float(whole.max_val)) == (0, 3.0)
    whole.load_state_dict({"min_val": torch.tensor([]), "max_val": torch.tensor([])})
    assert not whole.has_seen


@pytest.mark.parametrize(
    "observer",
    [
        own_observers.PlaceholderObserver(),
        own_observers.RecordingObserver(),
        own_observers.NoopObserver(),
        own_observers.ReuseInputObserver(),
    ],
    ids=lambda observer: type(observer).__name__,
)
def test_observers_without_a_range_have_no_scale(observer: Any) -> None:
    x = torch.ones(2)
    assert observer(x) is x
    with pytest.raises(ObservationError, match=type(observer).__name__):
        observer.calculate_qparams()


def test_a_recording_keeps_copies_of_all_it_was_given() -> None:
    observer, x = own_observers.RecordingObserver(), torch.zeros(2)
    observer(x)
    x += 1
    observer(x)
    assert [tensor.tolist() for tensor in observer.get_tensor_value()] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_known_grid_is_not_moved_by_data() -> None:
    observer = own_observers.FixedQParamsObserver(0.5, 7)
    observer(torch.tensor([1e6]))
    scale, zero_point = observer.calculate_qparams()
    assert (scale.tolist(), zero_point.tolist()) == ([0.5], [7])


def test_the_observers_of_a_model_are_saved_and_loaded_apart_from_it() -> None:
    def model() -> Any:
        made = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        made[1].add_module("activation_post_process", own_observers.MinMaxObserver())
        return made

    one, other = model(), model()
    one[1].activation_post_process(torch.tensor([-2.0, 5.0]))
    state = own_observers.observer_state_dict(one)
    assert sorted(state) == [f"1.activation_post_process.{name}" for name in ("eps", "max_val", "min_val")]
    before = other[0].weight.clone()
    own_observers.load_observer_state_dict(other, state)
    assert other[1].activation_post_process.max_val == 5.0
    assert torch.equal(other[0].weight, before)
    with pytest.raises(ObservationError, match=r"2\.activation_post_process"):
        own_observers.load_observer_state_dict(other, {"2.activation_post_process.min_val": torch.zeros(1)})
