"""Interleaved timing: turns, ratios of rounds, and closeness to the float model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quantc.bench.race import (
    EAGER,
    MAX_REPEATS,
    closeness,
    quietly_on_one_thread,
    race,
    repeats_of,
    seconds_of,
    speed,
    take_turns,
)
from quantc.errors import QuantcError
from tests.support.bench_tasks import tiny_task


def test_ratios_are_medians_of_rounds() -> None:
    assert speed([1.0, 2.0, 9.0], [2.0, 1.0, 3.0]) == 2.0
    assert speed([1.0], [1.0]) == 1.0


def test_turns_alternate_and_time_what_they_call() -> None:
    order: list[str] = []

    def busy(name: str, seconds: float) -> Any:
        def step() -> None:
            order.append(name)
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass

        return step

    rounds = 12
    spent = take_turns({"slow": busy("slow", 0.006), "fast": busy("fast", 0.003)}, (), rounds)
    turns = order[-4 * rounds :]  # in each, one call that is not timed and one that is
    pairs = {tuple(turns[at : at + 4]) for at in range(0, len(turns), 4)}
    assert pairs == {("slow", "slow", "fast", "fast"), ("fast", "fast", "slow", "slow")}, "each comes first at times"
    assert {name: len(times) for name, times in spent.items()} == {"slow": rounds, "fast": rounds}
    assert all(each >= 0.006 for each in spent["slow"])
    assert 1.5 < speed(spent["slow"], spent["fast"]) < 2.5


def test_closeness_is_the_ratio_of_powers() -> None:
    generator = np.random.default_rng(0)
    pairs = [(generator.normal(size=(3, 5)), generator.normal(size=(3, 5)) * 0.1) for _ in range(2)]
    unseen = [(torch.tensor(x, dtype=torch.float32), torch.tensor(e, dtype=torch.float32)) for x, e in pairs]
    found = closeness(lambda x, e: x, lambda x, e: x + e, unseen)
    signal, error = (sum(float((pair[at] ** 2).sum()) for pair in pairs) for at in (0, 1))
    assert found == pytest.approx(10 * math.log10(signal / error), abs=1e-3)
    with pytest.raises(QuantcError, match="another form"):
        closeness(lambda x, e: x, lambda x, e: x[:1], unseen)


def test_a_race_has_a_row_for_each() -> None:
    task = tiny_task()
    rows = race("tiny", {EAGER: task.model, "same": task.model}, task.unseen, 2)
    assert [row.contender for row in rows] == [EAGER, "same"]
    assert rows[1].sqnr == math.inf
    assert rows[1].to_data()["sqnr"] == "inf", "JSON has no infinity"


def test_short_calls_are_repeated_until_they_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "process_time", lambda: clock[0])

    def lasting(seconds: float) -> Callable[[], None]:
        def step() -> None:
            clock[0] += seconds

        return step

    assert repeats_of(lasting(1e-3), (), 5e-3) == 5
    assert repeats_of(lasting(1.0), (), 5e-3) == 1
    assert repeats_of(lasting(1e-9), (), 5e-3) == MAX_REPEATS
    assert repeats_of(lasting(0.0), (), 5e-3) == MAX_REPEATS
    assert seconds_of(lasting(0.25), (), 4) == 0.25


def test_measuring_leaves_threads_and_gradients_as_they_were() -> None:
    before = torch.get_num_threads()
    seen: list[object] = []

    def measured() -> None:
        with quietly_on_one_thread():
            seen.extend([torch.get_num_threads(), torch.is_grad_enabled()])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measured()
    assert seen == [1, False]
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (before, True)
