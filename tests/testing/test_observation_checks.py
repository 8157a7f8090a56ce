"""The kit on observations: good ones pass, and each faulty one fails in its row."""

from __future__ import annotations

from typing import Any

import pytest

from quantc.observe.fit import Fit
from quantc.observe.fixed_qparams import FixedQParams
from quantc.observe.minmax import MinMax
from quantc.observe.moving_average import MovingAverage
from quantc.testing import check_backend
from tests.support import faulty_plugins as plugins


@pytest.mark.parametrize("kind", [plugins.Copied, MinMax, MovingAverage, Fit])
def test_a_good_observation_passes(kind: Any) -> None:
    found = check_backend(kind)
    assert found.failures == ()
    assert (found.noun, found.backend) == ("observation", kind.statistics)
    assert (found.row("", "merges") is None) == (kind is MovingAverage)


@pytest.mark.parametrize(
    ("kind", "check", "told"),
    [
        (plugins.LastWins, "merges", "the scale"),
        (plugins.Forgetful, "state", "another one comes back"),
        (plugins.Unrounded, "qparams", "more than 1 significant bits (scale_bits)"),
        (plugins.Tiny, "qparams", "is below the smallest one"),
        (plugins.Careless, "refuses", "of NaN: no DataError"),
        (plugins.Mutating, "unchanged", "merge or qparams changes what they read"),
        (plugins.Lacking, "ready", "it lacks empty, update, merge"),
    ],
)
def test_a_faulty_observation_fails_in_its_row(kind: Any, check: str, told: str) -> None:
    found = check_backend(kind)
    row = found.row("", check)
    assert row is not None
    assert not row.passed
    assert told in row.what
    assert row.advice
    assert {failure.check for failure in found.failures} <= {check, "merges"}


def test_options_are_handed_on() -> None:
    assert not check_backend(FixedQParams).passed
    found = check_backend(FixedQParams, options={"scale": 0.5, "zero_point": 0})
    assert found.row("", "state") is not None
