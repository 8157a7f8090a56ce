"""Moments against float64 ones of NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from quantc.errors import ObservationError
from quantc.observe.moments import Moments
from tests.support.laws import law
from tests.support.statistics import Batch, batches, statistic


@law(60)
@given(batches())
def test_moments_are_those_of_the_rows(data: list[Batch]) -> None:
    found = statistic("moments", data)
    assert isinstance(found, Moments)
    rows = np.concatenate([x.numpy().astype(np.float64) for _, x in data], axis=1)
    assert found.seen == rows.shape[1]
    if not found.seen:
        return
    largest = np.abs(rows).max(1)
    assert (np.abs(found.mean().numpy() - rows.mean(1)) <= largest * 2.0**-14).all()
    assert (np.abs(found.mean_square().numpy() - (rows**2).mean(1)) <= largest**2 * 2.0**-13).all()


def test_channels_must_agree() -> None:
    found = statistic("moments", [(0, torch.ones(1, 2, 3))])
    with pytest.raises(ObservationError, match="2 groups of 3 channels"):
        found.update(torch.ones(2, 2, 3), batch=1)
