"""`engine="auto"`: measures the installed engines on the program's own inputs, and keeps the fastest that agrees."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quantc.errors import QuantcError
from quantc.ir.program import Program
from quantc.support.sqnr import Noise, as_data, format_sqnr
from quantc.support.terminal import plain_rows
from quantc.targets.deployed_module import Deployed
from quantc.targets.engines.engine_table import TORCH

ENOUGH = 30.0
"""In dB, against the Q/DQ form. Sums that overflow, or a range that is forgotten, cost more than that."""
SLACK = 6.0
"""In dB: the margin below torch's kernels within which an engine is accepted. Engines cannot be compared with the integer form
op by op; in deep models a few different roundings grow."""
SECONDS = 1.0
"""Seconds of timing per engine."""
MIN_RUNS, MAX_RUNS = 3, 200
"""Bounds on the number of rounds."""


@dataclass(frozen=True)
class EngineTiming:
    """Time and agreement of one engine."""

    engine: str
    milliseconds: float | None
    sqnr: float | None
    """Against the Q/DQ form, in dB."""
    why_not: str = ""
    """The reason why it was left out."""


class Chosen(Deployed):
    """The fastest engine's module, and all measurements."""

    def __init__(self, made: nn.Module, name: str, engine: str, measured: tuple[EngineTiming, ...]) -> None:
        super().__init__()
        self.chosen = made
        self._name = name
        self.engine = engine
        self.measured = measured
        self.eval()

    @property
    def program(self) -> Program:
        """The program of the chosen module: torch's kernels keep the integer form only."""
        found: Program = self.chosen.program  # type: ignore[assignment]
        return found

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.chosen(*args, **kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program to a file that `qc.load` reads."""
        self.chosen.save(path)  # type: ignore[operator]

    @property
    def headline(self) -> str:
        timed = [row for row in self.measured if row.milliseconds is not None]
        rank = f"the fastest of {len(timed)} engines" if len(timed) > 1 else "the only engine that can be taken"
        return f"{self._name} on x86, run by {self.engine}, {rank}"

    def to_data(self) -> dict[str, Any]:
        """Choice and measurements, as JSON-compatible data."""
        return {
            "program": self._name,
            "target": "x86",
            "engine": self.engine,
            "measured": [{**asdict(row), "sqnr": as_data(row.sqnr)} for row in self.measured],
            "chosen": self.chosen.to_data(),  # type: ignore[operator]
        }

    def __str__(self) -> str:
        rows = [
            (
                row.engine,
                "" if row.milliseconds is None else f"{row.milliseconds:.2f}",
                format_sqnr(row.sqnr),
                row.why_not,
            )
            for row in self.measured
        ]
        return "\n".join([self.headline, *plain_rows(("engine", "ms", "SQNR, dB", "why not"), rows)])


def choose(program: Program, makers: Mapping[str, Callable[[], nn.Module]], reasons: Mapping[str, str]) -> Chosen:
    """Build what can be built, time it interleaved, and keep the fastest that agrees closely enough. torch's kernels
    come first: their agreement is the threshold for the others.
    """
    args, kwargs = _inputs(program)
    wanted = program(*args, **kwargs)
    rows = {name: EngineTiming(name, None, None, why) for name, why in reasons.items()}
    fit: dict[str, nn.Module] = {}
    least = ENOUGH
    for name, make in makers.items():
        made = _build(make)
        if isinstance(made, str):
            rows[name] = EngineTiming(name, None, None, made)
            continue
        sqnr = _close(wanted, made(*args, **kwargs))
        if name == TORCH:
            least = min(ENOUGH, sqnr - SLACK)
        rows[name] = EngineTiming(name, None, sqnr, "" if sqnr >= least else f"less than {least:.1f} dB")
        if sqnr >= least:
            fit[name] = made
    if not fit:
        raise QuantcError(
            f"no engine computes what {program.name} says",
            where="; ".join(f"{row.engine}: {row.why_not}" for row in rows.values()),
            advice='name an engine, engine="torch", and compare its results with those of the program',
        )
    times = _measure(fit, args, kwargs)
    for name, seconds in times.items():
        rows[name] = EngineTiming(name, seconds * 1e3, rows[name].sqnr)
    fastest = min(times, key=lambda name: times[name])
    return Chosen(fit[fastest], program.name, fastest, tuple(rows.values()))


def _build(make: Callable[[], nn.Module]) -> nn.Module | str:
    """A module, or why there is none."""
    try:
        return make()
    except (QuantcError, RuntimeError) as error:  # engines raise arbitrary errors; the reason is shown
        return str(error).partition("\n")[0]


def _inputs(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if program.example_inputs is None:
        raise QuantcError(
            f"{program.name} has no example inputs to measure engines on",
            where='qc.lower(..., "x86", engine="auto")',
            advice="capture the model with example inputs, or name an engine",
        )
    args, kwargs = pytree.tree_unflatten(list(program.example_inputs), program.signature.in_spec)
    return tuple(args), dict(kwargs)


def _close(wanted: Any, found: Any) -> float:
    noise = Noise()
    noise.add(wanted, found)
    return noise.sqnr if noise.count else math.inf


@torch.no_grad()
def _measure(modules: Mapping[str, nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, float]:
    """The least seconds that each takes, measured in turns, so that a busy machine is so for all."""
    least = dict.fromkeys(modules, math.inf)
    spent, rounds = 0.0, 0
    while rounds < MIN_RUNS or (spent < SECONDS * len(modules) and rounds < MAX_RUNS):
        for name, module in modules.items():
            start = perf_counter()
            module(*args, **kwargs)
            seconds = perf_counter() - start
            least[name] = min(least[name], seconds)
            spent += seconds
        rounds += 1
    return least
