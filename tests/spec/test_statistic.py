"""The protocol of statistics, and observations beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from quantc.observe.histogram import Histogram
from quantc.observe.minmax import MinMax
from quantc.spec.formats import PerChannel, PerTensor
from quantc.spec.statistic import Change, Permutation, Rotation, Scale, carried
from tests.support.observations import bits_of


def minmax(x: Tensor, *, per_channel: bool) -> MinMax:
    found = MinMax.empty(PerChannel(axis=1) if per_channel else PerTensor(), {})
    found.update(x)
    return found


def test_extremes_of_channels_are_carried_in_bits() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    factors, index = torch.tensor([2.0, -1.0, 0.5, -0.25, 4.0, 1.0]), torch.randperm(6)
    for by, changed in ((Scale(factors), x * factors), (Permutation(index), x[:, index])):
        again = carried(minmax(x, per_channel=True), by)
        assert bits_of(again) == bits_of(minmax(changed, per_channel=True))


def test_what_must_be_seen_again_is_none() -> None:
    x = torch.randn(50, 6)
    turn: Change = Rotation(torch.eye(6))
    assert carried(minmax(x, per_channel=True), turn) is None
    assert carried(minmax(x, per_channel=False), Scale(torch.ones(6))) is None
    assert carried(Histogram.empty(PerTensor(), {}), Scale(torch.ones(6))) is None
