"""Calibration report, as text and as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from quantc.calibration.observed_tensors import data_groups
from quantc.calibration.underflow import Coarse, extremes_of
from quantc.ir.program import Program
from quantc.ir.site_index import Places
from quantc.observe.auto import Auto
from quantc.observe.store import Statistics
from quantc.spec.halves import Halves
from quantc.spec.observation import Observation

SHOWN = 40
"""Maximum number of groups printed."""


@dataclass(frozen=True, slots=True)
class GroupRange:
    """Observed range of one group."""

    group: str
    where: str
    """The node that makes its first tensor, and where that comes from."""
    observe: str
    low: float | None
    """The extremes; None if nothing was seen, or the observation keeps none."""
    high: float | None
    seen: int
    """Number of observed elements."""
    chosen: str = ""
    """For `auto`: the range method, and the errors that decided."""


@dataclass(frozen=True)
class CalibrationReport:
    """Statistics seen by a calibration. Prints as a table; `to_json` for machine reading."""

    name: str
    """The program's."""
    batches: int
    """Of this call."""
    total: int
    """Batches that the program's statistics are of: those of earlier calls too."""
    samples: int | None
    """Of this call, where the first dimension of the inputs says so."""
    seconds: float
    groups: tuple[GroupRange, ...]
    notes: tuple[str, ...]
    coarse: tuple[Coarse, ...]
    """Groups whose range is too small for the smallest scale, so that they use few levels."""
    seen: Mapping[str, Observation] = field(repr=False)
    describe: Callable[[], Mapping[str, Any]] = field(repr=False)
    """Identity of the statistics. Computed lazily: it digests all weights."""
    collected: Mapping[str, Halves] = field(default_factory=dict, repr=False)

    @cached_property
    def statistics(self) -> Statistics:
        """All statistics known at that time. `statistics.save(path)` keeps them for `qc.use_statistics`."""
        return Statistics(self.seen, self.describe(), self.collected)

    @property
    def unseen(self) -> tuple[str, ...]:
        """Groups that no batch has reached, as in a branch that was never taken."""
        return tuple(row.group for row in self.groups if not row.seen)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "batches": self.batches,
            "total": self.total,
            "samples": self.samples,
            "seconds": self.seconds,
            "unseen": list(self.unseen),
            "notes": list(self.notes),
            "warnings": [str(row) for row in self.coarse],
            "coarse": [asdict(row) for row in self.coarse],
            "groups": [asdict(row) for row in self.groups],
        }

    def __str__(self) -> str:
        from quantc.support.terminal import plain_rows

        samples = f", {self.samples} samples" if self.samples is not None else ""
        before = f" ({self.total} in all)" if self.total != self.batches else ""
        lines = [f"calibrated {self.name}: {batch_count(self.batches)}{before}{samples}, {self.seconds:.1f} s"]
        lines += [f"  {note}" for note in self.notes]
        lines += [f"  warning: {row}" for row in self.coarse]
        if self.unseen:
            lines.append(f"  never reached, and so not to be converted: {', '.join(self.unseen)}")
        rows = [
            (row.where, row.chosen or row.observe, _show(row.low), _show(row.high), str(row.seen))
            for row in self.groups
        ]
        if rows:
            lines += plain_rows(("tensor", "observe", "low", "high", "seen"), rows[:SHOWN])
        if len(rows) > SHOWN:
            lines.append(f"  and {len(rows) - SHOWN} more; .groups has them all")
        return "\n".join(lines)


def batch_count(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def rows_of(program: Program) -> tuple[GroupRange, ...]:
    """Observed range of each calibrated group of a program."""
    places = Places(program)
    rows = []
    for group, spec in data_groups(program):
        where = program.describe(places.node(group.values[0]))
        observation = program.plan.statistics.get(group.name)
        low, high = extremes_of(observation)
        seen = observation.seen if observation is not None else 0
        chosen = str(observation.chosen(spec)) if isinstance(observation, Auto) and observation.seen else ""
        rows.append(GroupRange(group.name, where, str(spec.observe), low, high, seen, chosen))
    return tuple(rows)
