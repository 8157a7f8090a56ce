"""Judgments: gains in decibels, and one line of text."""

from __future__ import annotations

import math

import pytest

from quantc.ir.judgment import Judgment


@pytest.mark.parametrize(
    ("before", "after", "gain"),
    [
        (0.01, 0.001, 10.0),
        (0.001, 0.01, -10.0),
        (0.01, 0.0, math.inf),
        (0.0, 0.01, -math.inf),
        (0.0, 0.0, 0.0),
        (None, 0.1, None),
        (0.1, None, None),
    ],
)
def test_gains(before: float | None, after: float | None, gain: float | None) -> None:
    found = Judgment("site", "kept", before, after).gain
    assert found == pytest.approx(gain) if gain is not None else found is None


def test_text() -> None:
    assert str(Judgment("conv", "refused", reason="no data")) == "conv: refused (no data)"
    assert str(Judgment("conv", "kept", 0.01, 0.001)) == "conv: kept 20.00 dB -> 30.00 dB"
    assert str(Judgment("conv", "undone", 0.01, 0.0, "why")) == "conv: undone 20.00 dB -> exact (why)"
