"""What came of quantizing a model: the data behind `print(result.report)` and `quantc quantize`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Literal

from rich.console import Console

from quantc.calibration_report import CalibrationReport
from quantc.formats import Timing
from quantc.inspect.compare import Comparison, Layer
from quantc.inspect.coverage import Coverage, Verdict
from quantc.inspect.noise import shown
from quantc.inspect.size import Size
from quantc.inspect.techniques import HEAD as TECHNIQUE
from quantc.inspect.techniques import with_techniques
from quantc.program import LogEntry
from quantc.terminal import Screen

MOST_ROWS = 20
"""How many rows of each table the text shows."""
MeasuredOn = Literal["batches", "example inputs"]
EXAMPLES = "the example inputs"
WORTH_TELLING = 0.9
"""A program that is saved smaller than it is in memory by this much has integers of few bits."""


@dataclass(frozen=True, slots=True)
class Step:
    """One verb, and how long it took."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """What was quantized and why the rest was not, how close the numbers come, how large the program is."""

    name: str
    backend: str
    form: str
    """Of the quantized program: "qdq" or "integer"."""
    coverage: Coverage
    calibration: CalibrationReport | None
    """None where no scales come from data."""
    comparison: Comparison | None
    """Against the float program, on the first batches, or on the example inputs where there are none. None without
    either."""
    size: Size
    steps: tuple[Step, ...]
    log: tuple[LogEntry, ...]
    """What each pass did, and what it had to say."""
    measured_on: MeasuredOn = "batches"
    """What the comparison is of: the first batches, or the inputs the model was captured with where none were given."""

    def to_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "backend": self.backend,
            "form": self.form,
            "coverage": self.coverage.to_data(),
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "comparison": None if self.comparison is None else self.comparison.to_data(),
            "measured_on": None if self.comparison is None else self.measured_on,
            "size": self.size.to_data(),
            "steps": [asdict(step) for step in self.steps],
            "log": [asdict(entry) for entry in self.log],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    def show(self, screen: Screen, extra: Mapping[str, str] | None = None) -> None:
        """Print it, with more lines at the top if there are any."""
        found, seen = self.comparison, self.calibration
        screen.fields(
            f"{self.name}, quantized for {self.backend}{', in integer form' if self.form == 'integer' else ''}",
            {
                **(extra or {}),
                "coverage": self.coverage.headline.partition(": ")[2],
                "calibrated with": self._calibrated_with,
                "SQNR": self._sqnr,
                "size": self._size,
                "time": ", ".join(f"{step.name} {step.seconds:.2f} s" for step in self.steps),
            },
        )
        techniques = {row.node: row.technique for row in self.coverage.rows}
        layers = [] if found is None else [_layer_cells(layer, techniques) for layer in found.worst()]
        head, cells = with_techniques(("node", "op", "rule", TECHNIQUE, "module", "alone, dB", "here, dB"), layers)
        title = "what each quantized op costs, the worst first"
        _rows(screen, title, head, cells, "result.report.comparison.worst()")
        _rows(
            screen,
            "left float",
            ("node", "op", "module", "why"),
            [(row.node, row.op, row.module, row.reason) for row in self.coverage.rows_for(Verdict.FLOAT)],
            "result.report.coverage.rows_for('float')",
        )
        noted = [(entry.name, "; ".join(entry.notes)) for entry in self.log if entry.notes]
        _rows(screen, "what was done", ("pass", "notes"), noted, "result.program.log")
        unseen = () if seen is None else (*seen.notes, *(f"no batch reached {group}" for group in seen.unseen))
        for note in (*unseen, *(() if found is None else found.notes)):
            screen.text(f"note: {note}")

    @property
    def _calibrated_with(self) -> str:
        if self.calibration is not None:
            return _counted(self.calibration.batches)
        techniques = self.coverage.techniques
        if techniques[Timing.DYNAMIC]:
            return "no data: the scales of activations are found as the program runs"
        if techniques[Timing.WEIGHT_ONLY] and not techniques[Timing.STATIC]:
            return "no data: weights alone are quantized, and their scales come from the weights"
        return "no data: no scale comes from it"

    @property
    def _size(self) -> str:
        size = self.size
        text = f"{readable(size.before)} -> {readable(size.after)} ({size.ratio:.1%})"
        if size.stored is None or size.stored > size.after * WORTH_TELLING:
            return text
        return f"{text}, packed in a file {readable(size.stored)} ({size.stored_ratio:.1%})"

    @property
    def _sqnr(self) -> str:
        if self.comparison is None:
            return "not measured: there are neither batches nor example inputs"
        is_of_batches = self.measured_on == "batches"
        return (
            f"{shown(self.comparison.sqnr)} dB over {_counted(self.comparison.batches) if is_of_batches else EXAMPLES}"
        )

    def __str__(self) -> str:
        text = StringIO()
        self.show(Screen(Console(file=text, highlight=False, force_terminal=False)))
        return text.getvalue().rstrip("\n")


def _layer_cells(layer: Layer, techniques: Mapping[str, str]) -> tuple[str, ...]:
    technique = techniques.get(layer.node, "")
    return layer.node, layer.op, layer.rule, technique, layer.module, shown(layer.local), shown(layer.sqnr)


def _counted(batches: int) -> str:
    return "1 batch" if batches == 1 else f"{batches} batches"


def _rows(
    screen: Screen, title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], all_of_them: str
) -> None:
    """A table of the first rows, and where the others are; nothing if there are none."""
    if rows:
        screen.table(title, columns, rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        screen.text(f"  … and {len(rows) - MOST_ROWS} more: {all_of_them}")


def readable(count: float) -> str:
    """A number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
