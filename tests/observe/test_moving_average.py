"""Moving averages of ranges: torch's own numbers, refused when merged, and read back from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.ao.quantization.observer import MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver

from quantc.errors import DataError, LoadError, ObservationError, SpecError
from quantc.observe import MovingAverage, Order, State, Statistics, start
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.spec import INT8, INT8_WEIGHT, UINT8
from tests.support.observations import bits_of, observed


def test_moving_average_is_torchs() -> None:
    generator = torch.Generator().manual_seed(3)
    spec = UINT8.but(observe="moving-average{rate=0.1}")
    channels = INT8_WEIGHT.but(observe="moving-average", role="act")
    ours, ours_channels = start(spec), start(channels)
    theirs = MovingAverageMinMaxObserver(averaging_constant=0.1, eps=spec.eps)
    theirs_channels = MovingAveragePerChannelMinMaxObserver(
        dtype=torch.int8, qscheme=torch.per_channel_symmetric, eps=channels.eps
    )
    for _ in range(20):
        x = torch.randn(5, 7, generator=generator)
        for observer in (theirs, theirs_channels):
            observer(x)
        ours.update(x)
        ours_channels.update(x)
    scale, zero_point = theirs.calculate_qparams()
    assert ours.qparams(spec).one == (scale.item(), zero_point.item())
    assert torch.equal(ours_channels.qparams(channels).scale, theirs_channels.calculate_qparams()[0])


def test_moving_average_says_that_order_matters_and_is_refused_when_merged(tmp_path: Path) -> None:
    spec = INT8.but(observe="moving-average")
    one, other = observed(spec, [torch.ones(3)]), observed(spec, [torch.zeros(3)])
    assert MovingAverage.order is Order.MATTERS
    with pytest.raises(ObservationError, match="depend on the order of the data") as caught:
        one.merge(other)
    assert caught.value.advice is not None
    assert "one process" in caught.value.advice
    with pytest.raises(ObservationError) as named:
        Statistics({"relu:out0": one}).merge(Statistics({"relu:out0": other}))
    assert named.value.where == "relu:out0"
    assert bits_of(one.merge(start(spec))) == bits_of(start(spec).merge(one)) == bits_of(one)
    Statistics({"relu:out0": one}).save(tmp_path / "s.safetensors")
    assert bits_of(Statistics.load(tmp_path / "s.safetensors").sites["relu:out0"]) == bits_of(one)


def test_each_batch_moves_both_ends_by_its_rate() -> None:
    average = MovingAverage.empty(PerTensor(), {"rate": 0.25})
    average.update(torch.tensor([-1.0, 2.0]))
    average.update(torch.tensor([-3.0, 10.0]))
    assert average.low is not None
    assert average.high is not None
    assert (float(average.low), float(average.high)) == (-1.5, 4.0)  # a quarter of the way from -1 to -3, from 2 to 10
    assert average.seen == 4


def test_a_batch_with_nan_is_counted_and_moves_nothing() -> None:
    spec = INT8.but(observe="moving-average{rate=0.5}")
    average = MovingAverage.empty(PerTensor(), {"rate": 0.5})
    average.update(torch.tensor([0.0, 1.0]))
    average.update(torch.tensor([100.0, torch.nan]))
    assert average.high is not None
    assert float(average.high) == 1.0
    assert (average.seen, average.non_finite) == (4, 1)
    with pytest.raises(DataError, match="1 of 4"):
        average.qparams(spec)


def test_channels_that_change_their_number_are_refused() -> None:
    average = MovingAverage.empty(PerChannel(axis=0), {})
    average.update(torch.ones(3, 2))
    with pytest.raises(ObservationError, match=r"\[3\] cannot move to \[4\]") as caught:
        average.update(torch.ones(4, 2), where="add:out0")
    assert caught.value.where == "add:out0"


@pytest.mark.parametrize("rate", [0, -0.1, 1.5, True, "fast"])
def test_rates_outside_of_their_range_are_refused(rate: float | str) -> None:
    with pytest.raises(SpecError, match="rate"):
        MovingAverage.empty(PerTensor(), {"rate": rate})


def test_the_largest_rate_follows_the_last_batch_alone() -> None:
    average = MovingAverage.empty(PerTensor(), {"rate": 1})
    for batch in (torch.tensor([-9.0, 9.0]), torch.tensor([-1.0, 2.0])):
        average.update(batch)
    assert bits_of(average)["low"] == bits_of(observed(INT8, [torch.tensor([-1.0, 2.0])]))["low"]


def test_options_and_states_that_it_has_not_are_refused() -> None:
    with pytest.raises(SpecError, match="'speed'"):
        MovingAverage.empty(PerTensor(), {"speed": 1})
    state = observed(INT8.but(observe="moving-average"), [torch.ones(2)]).to_state()
    with pytest.raises(LoadError, match="rate"):
        MovingAverage.from_state(PerTensor(), State(state.tensors, {**state.values, "rate": 2.0}))
    with pytest.raises(LoadError, match="'high'"):
        MovingAverage.from_state(PerTensor(), State({**state.tensors, "high": torch.ones(2)}, state.values))
