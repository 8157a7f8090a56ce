"""Interleaved timing of contenders in one process, on one thread, on the same input.

The speedup over the float model is the median over the rounds, in CPU seconds: a shared machine slows all of a round
alike, so the ratio within a round holds where no single time does.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

import torch

from quantc.bench.models import Inputs
from quantc.errors import QuantcError
from quantc.support.sqnr import Noise, as_data

EAGER = "eager"
"""The float model itself, which all others are held against."""
SHORTEST = 2e-3
"""A turn lasts at least so many seconds: short calls are repeated."""
MAX_REPEATS = 1000

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One contender on one model. If it could not take part, `reason` says why and there are no numbers."""

    model: str
    contender: str
    milliseconds: float | None = None
    """The best of all rounds."""
    speed: float | None = None
    """Speedup over the float model, the median over the rounds."""
    sqnr: float | None = None
    """In dB against the float model, on unseen inputs."""
    size: float | None = None
    """Bytes of the weights, as a share of the float model's."""
    build_seconds: float | None = None
    """Wall-clock seconds of building it."""
    reason: str = ""

    def to_data(self) -> dict[str, Any]:
        return {**vars(self), "sqnr": as_data(self.sqnr)}


@contextmanager
def quietly_on_one_thread() -> Iterator[None]:
    """Measurement context: one thread, no gradients, no warnings."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def race(name: str, steps: Mapping[str, Forward], unseen: Inputs, rounds: int) -> list[Row]:
    """Time contenders interleaved; the float model is among them. All must be able to run."""
    fidelity = {other: closeness(steps[EAGER], step, unseen) for other, step in steps.items()}
    spent = take_turns(steps, unseen[0], rounds)
    return [
        Row(name, other, min(times) * 1e3, speed(spent[EAGER], times), fidelity[other])
        for other, times in spent.items()
    ]


def closeness(model: Forward, other: Forward, unseen: Inputs) -> float:
    """SQNR of a contender in dB, over all inputs."""
    noise = Noise()
    for inputs in unseen:
        if not noise.add(model(*inputs), other(*inputs)):
            raise QuantcError("what it yields has another form or shape than what the float model yields")
    return noise.sqnr


def take_turns(steps: Mapping[str, Forward], inputs: tuple[Any, ...], rounds: int) -> dict[str, list[float]]:
    """CPU seconds per call of each, in every round.

    The order is shuffled each round, and the first call of a turn is not timed: the previous one leaves its weights in
    the caches, and in a fixed order the same program was up to 6 % slower in one position than in another.
    """
    repeats = {name: repeats_of(step, inputs) for name, step in steps.items()}
    spent: dict[str, list[float]] = {name: [] for name in steps}
    order, chance = list(steps), Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            steps[name](*inputs)
            spent[name].append(seconds_of(steps[name], inputs, repeats[name]))
    return spent


def repeats_of(step: Forward, inputs: tuple[Any, ...], shortest: float = SHORTEST) -> int:
    """Number of calls that lasts long enough to be timed. The first calls are not timed."""
    step(*inputs)
    once = seconds_of(step, inputs, 1)
    return min(MAX_REPEATS, max(1, math.ceil(shortest / once))) if once > 0 else MAX_REPEATS


def seconds_of(step: Forward, inputs: tuple[Any, ...], repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        step(*inputs)
    return (time.process_time() - begin) / repeats


def speed(base: list[float], own: list[float]) -> float:
    """Speedup: the median over the rounds."""
    return median(theirs / mine for theirs, mine in zip(base, own, strict=True))
