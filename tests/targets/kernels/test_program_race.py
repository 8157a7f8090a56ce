"""Races of whole programs: variants of one program, timed in turns."""

from __future__ import annotations

from quantc.targets.kernels.program_race import fastest


def test_chance_does_not_decide() -> None:
    assert fastest({"first": 100.0, "second": 99.0}) == "first"
    assert fastest({"first": 100.0, "second": 97.0, "third": 96.0}) == "second"
