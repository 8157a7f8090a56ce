"""Races of whole programs: variants of one program, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.targets.kernels.program_race import WARM_UP, fastest, race


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A time that only the variants move, in seconds of the processor."""
    now = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: now[0])
    return now


def taking(clock: list[float], *seconds: float) -> Callable[..., None]:
    turns = iter(seconds)

    def run(*inputs: Any) -> None:
        clock[0] += next(turns)

    return run


def test_times_are_microseconds_of_the_lowest_turns_after_the_first_ones(clock: list[float]) -> None:
    forms = {"steady": taking(clock, 9.0, 9.0, *[0.5] * 8), "moody": taking(clock, 9.0, 9.0, 0.25, 0.25, *[7.0] * 6)}
    assert race(forms, (), turns=8) == {"steady": 5e5, "moody": 2.5e5}


def test_variants_take_turns() -> None:
    seen: list[str] = []
    forms: dict[str, Callable[..., Any]] = {name: lambda name=name: seen.append(name) for name in ("a", "b")}
    race(forms, (), turns=3)
    assert seen == ["a", "b"] * (WARM_UP + 3)


def test_each_run_gets_copies_of_the_inputs_and_records_no_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    sums: list[float] = []

    def spoils(x: Tensor, number: int) -> None:
        assert number == 3
        assert not torch.is_grad_enabled()
        sums.append(float(x.sum()))
        x.zero_()

    race({"a": spoils, "b": spoils}, (x, 3), turns=2)
    assert sums == [2.0] * 2 * (WARM_UP + 2)


def test_on_several_threads_the_time_on_the_wall_counts(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    wall = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)

    def run() -> None:
        wall[0] += 1.0
        clock[0] += 2.0

    assert race({"a": run}, (), turns=4) == {"a": 1e6}


def test_chance_does_not_decide() -> None:
    assert fastest({"first": 100.0, "second": 99.0}) == "first"
    assert fastest({"first": 100.0, "second": 97.0, "third": 96.0}) == "second"
    assert fastest({"only": 0.0}) == "only"
