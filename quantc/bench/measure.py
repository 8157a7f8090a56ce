"""Measurement of all contenders on one model: build each, measure its accuracy, time them interleaved."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from typing import Any

import torch

from quantc.bench.contender_build import Built
from quantc.bench.contenders import Contender, constants_frozen
from quantc.bench.floor import Floor, kernel_floor
from quantc.bench.models import Task
from quantc.bench.race import EAGER, Row, closeness, quietly_on_one_thread, speed, take_turns
from quantc.errors import QuantcError

LONGEST_REASON = 160

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """Result for one model."""

    rows: tuple[Row, ...]
    floors: Mapping[str, Floor]
    """By contender, of those on quantc's kernels; empty unless requested."""

    def to_data(self) -> dict[str, Any]:
        floors = {name: floor.to_data() for name, floor in self.floors.items()}
        return {"rows": [row.to_data() for row in self.rows], "floors": floors}


def measure(
    task: Task, contenders: Mapping[str, Contender], rounds: int, *, tell: Tell, with_floor: bool = False
) -> Outcome:
    """Build the contenders, the float model first, and time those that could be built, interleaved.

    `tell` gets progress messages.
    """
    rows: dict[str, Row] = {}
    built: dict[str, Built] = {}
    with quietly_on_one_thread(), constants_frozen():
        for name, contender in contenders.items():
            tell(f"{task.name}: building {name}")
            rows[name], made = _enter(task, name, contender)
            if made is not None:
                built[name] = made
        tell(f"{task.name}: taking turns, {rounds} rounds")
        spent = take_turns({name: made.run for name, made in built.items()}, task.unseen[0], rounds)
        whole = built[EAGER].weight_bytes
        for name, times in spent.items():
            own = built[name].weight_bytes
            size = own / whole if own is not None and whole else None
            best = min(times) * 1e3
            rows[name] = replace(rows[name], milliseconds=best, speed=speed(spent[EAGER], times), size=size)
        floors: dict[str, Floor] = {}
        for name, made in built.items():
            if with_floor and made.lowered is not None:
                tell(f"{task.name}: timing the ops of {name}")
                floors[name] = kernel_floor(made.lowered, *task.unseen[0])
    del built
    torch.compiler.reset()  # compiled code is of no use to the next model
    gc.collect()
    return Outcome(tuple(rows.values()), floors)


def _enter(task: Task, name: str, contender: Contender) -> tuple[Row, Built | None]:
    """A contender that was built and has run, with its SQNR; or a row that says why it could not."""
    begin = time.perf_counter()
    try:
        with redirect_stdout(sys.stderr):  # tools print progress; standard output is for results
            made = contender.make(task)
            seconds = time.perf_counter() - begin
            close = closeness(task.model, made.run, task.unseen)
    except Exception as error:
        if name == EAGER:
            raise QuantcError(
                f"the model itself does not run: {why(error)}", where=task.name, advice="look at its inputs"
            ) from error
        return Row(task.name, name, reason=why(error)), None
    return Row(task.name, name, sqnr=None if name == EAGER else close, build_seconds=seconds), made


def why(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, QuantcError):
        text = "; ".join(part for part in (error.what, error.advice) if part)
    else:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"
