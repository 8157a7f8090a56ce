"""The histogram observer: counts and the range it narrows to are torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch

import quantc.nn.observers as own_observers
from quantc.errors import SpecError
from tests.support.observer_cases import ao, same


def test_a_long_calibration_of_a_histogram_is_torch_s() -> None:
    torch.manual_seed(0)
    mine, theirs = own_observers.HistogramObserver(reduce_range=True), ao.HistogramObserver(reduce_range=True)
    for place in range(12):
        x = torch.randn(4, 16, 9, 9) * (0.5 + 0.2 * place) + torch.rand(1)
        mine(x)
        theirs(x)
    assert torch.equal(mine.histogram, theirs.histogram)
    same(mine.calculate_qparams(), theirs.calculate_qparams())


def test_infinity_is_left_out_of_histograms_and_said() -> None:
    observer = own_observers.HistogramObserver()
    with pytest.warns(UserWarning, match="infinite"):
        observer(torch.tensor([0.0, 1.0, torch.inf]))
    assert float(observer.max_val) == 1.0


@pytest.mark.parametrize("low", [-3.0, 0.0, 3.0])
def test_a_number_seen_alone_goes_to_its_bin_when_the_range_grows(low: float) -> None:
    mine, theirs = own_observers.HistogramObserver(bins=16), ao.HistogramObserver(bins=16)
    for batch in (torch.full((7,), 1.0), torch.tensor([low, 4.0])):
        mine(batch)
        theirs(batch)
    assert mine.histogram.sum() == 9
    assert torch.equal(mine.histogram, theirs.histogram)
    same(mine.calculate_qparams(), theirs.calculate_qparams())


def test_a_far_outlier_is_given_up_for_the_many() -> None:
    torch.manual_seed(0)
    observer = own_observers.HistogramObserver()
    observer(torch.cat([torch.rand(1_000_000), torch.tensor([4.0])]))
    (scale,) = observer.calculate_qparams()[0].tolist()
    assert (
        0.9 / 255 < scale < 1.5 / 255
    )  # and not 4 / 255: an error of 3 once, for a quarter of the step a million times


def test_what_was_seen_is_forgotten() -> None:
    observer = own_observers.HistogramObserver(bins=8)
    observer(torch.tensor([1.0, 5.0]))
    observer.reset_min_max_vals()
    assert not observer.has_seen
    assert not bool(observer.histogram.any())
    observer(torch.tensor([0.0, 1.0]))
    assert (float(observer.max_val), float(observer.histogram.sum())) == (1.0, 2.0)


def test_nothing_but_infinity_is_nothing() -> None:
    observer = own_observers.HistogramObserver()
    with pytest.warns(UserWarning, match="infinite"):
        observer(torch.tensor([torch.inf, -torch.inf]))
    assert not observer.has_seen


def test_scales_found_as_the_model_runs_are_not_those_of_a_histogram() -> None:
    with pytest.raises(SpecError, match="dynamic"):
        own_observers.HistogramObserver(is_dynamic=True)
