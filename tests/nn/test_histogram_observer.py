"""The histogram observer: counts and the range it narrows to are torch's, bit for bit."""

from __future__ import annotations

import pytest
import torch

import quantc.nn.observers as own_observers
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
