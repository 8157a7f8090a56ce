"""Quantization report: the data behind `print(result.report)` and `quantc quantize`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import StringIO
from typing import Any, Literal

from rich.console import Console

from quantc.calibration.calibration_report import CalibrationReport
from quantc.inspect.comparison import COSTS, Comparison, Layer, format_gain
from quantc.inspect.coverage import Coverage, Verdict
from quantc.inspect.findings import MODEL_DB, OP_DB, VANISHED, findings
from quantc.inspect.held_out import Outside
from quantc.inspect.recovery_report import HEAD, RecoveryReport
from quantc.inspect.report_html import Section, page
from quantc.inspect.size import Size
from quantc.inspect.techniques import HEAD as TECHNIQUE
from quantc.inspect.techniques import with_techniques
from quantc.ir.program import LogEntry
from quantc.spec.formats import Timing
from quantc.support.sqnr import format_sqnr
from quantc.support.terminal import Screen, readable

MAX_ROWS = 20
"""Maximum number of rows of each table in the text."""
MeasuredOn = Literal["batches", "example inputs"]
EXAMPLES = "the example inputs"
SLOWER = 0.97
"""Speedup below which a program is reported as slower; anything between this and 1 is noise."""
DIGITS = 4
"""Significant digits of times."""
WORTH_TELLING = 0.9
"""A program that is saved smaller than it is in memory by this much has integers of few bits."""


@dataclass(frozen=True, slots=True)
class Step:
    """One verb, and its duration."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Time per call of the float program, and of the quantized one on its target."""

    target: str
    """The target of the quantized program."""
    before: float
    """Milliseconds of the float model in torch, the best of all rounds."""
    after: float
    runtime: str = ""
    """The float program's runtime for a like comparison; empty if that was not measured."""
    runtime_before: float | None = None
    """Milliseconds of the float program there."""
    why_not: str = ""
    """The reason why the float program was not measured there."""

    def __post_init__(self) -> None:
        """Times are stored as displayed, so that the displayed speedup is their quotient."""
        for name in ("before", "after", "runtime_before"):
            spent = getattr(self, name)
            object.__setattr__(self, name, None if spent is None else float(f"{spent:.{DIGITS}g}"))

    @property
    def times(self) -> float:
        """Speedup over the float model in torch."""
        return _quotient(self.before, self.after)

    @property
    def runtime_times(self) -> float | None:
        """Speedup over the float program on the same runtime."""
        return None if self.runtime_before is None else _quotient(self.runtime_before, self.after)

    @property
    def against(self) -> tuple[tuple[str, float, float], ...]:
        """Baselines: name, milliseconds, and speedup of the quantized program."""
        own = [(self.runtime, self.runtime_before, self.runtime_times)]
        return (
            ("torch", self.before, self.times),
            *((name, spent, times) for name, spent, times in own if spent is not None and times is not None),
        )

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "times": self.times, "runtime_times": self.runtime_times}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for baselines that the quantized program is slower than."""
        slower = [
            f"{1 / times:.2f} times slower than float in {name}" for name, _, times in self.against if times < SLOWER
        ]
        return (f"the quantized program on {self.target} is {' and '.join(slower)}",) if slower else ()

    def __str__(self) -> str:
        told = [
            f"{1 / times:.2f} times slower than float in {name} ({_time_text(spent)} ms)"
            if times < SLOWER
            else f"{times:.2f} times as fast as float in {name} ({_time_text(spent)} ms)"
            for name, spent, times in self.against
        ]
        more = f"; {self.why_not}" if self.why_not else ""
        return f"{_time_text(self.after)} ms on {self.target}: {', '.join(told)} (one thread, {EXAMPLES}){more}"


@dataclass(frozen=True)
class Report:
    """Coverage, accuracy, size and speed of a quantized program, with reasons for float ops."""

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
    """The passes, with their notes."""
    speed: Speed | None = None
    """Measured by `quantc quantize`, on the artifact it lowers to; None otherwise."""
    measured_on: MeasuredOn = "batches"
    """The data of the comparison: batches, or the example inputs where none were given."""
    is_held_out: bool = True
    """True if calibration saw none of the comparison's data."""
    outside: tuple[Outside, ...] = ()
    """Held-out inputs that are far from the calibrated range."""
    recovery: RecoveryReport | None = None
    """Report of the passes that fit weights; None where nothing was fitted."""

    def to_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "backend": self.backend,
            "form": self.form,
            "warnings": list(self.warnings),
            "coverage": self.coverage.to_data(),
            "calibration": None if self.calibration is None else self.calibration.to_json(),
            "comparison": None if self.comparison is None else self.comparison.to_data(),
            "measured_on": None if self.comparison is None else self.measured_on,
            "held_out": None if self.comparison is None else self.is_held_out,
            "recovery": None if self.recovery is None else self.recovery.to_data(),
            "outside": [asdict(each) for each in self.outside],
            "thresholds": {"model_dB": MODEL_DB, "op_dB": OP_DB, "vanished": VANISHED},
            "size": self.size.to_data(),
            "speed": None if self.speed is None else self.speed.to_data(),
            "steps": [asdict(step) for step in self.steps],
            "log": [asdict(entry) for entry in self.log],
        }

    def to_json(self) -> str:
        return json.dumps(self.to_data(), indent=2, ensure_ascii=False)

    @property
    def title(self) -> str:
        return f"{self.name}, quantized for {self.backend}{', in integer form' if self.form == 'integer' else ''}"

    def fields(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """Summary lines, by name."""
        return {
            **(extra or {}),
            "coverage": self.coverage.headline.partition(": ")[2],
            "calibrated with": self._calibration_data,
            **({} if self.recovery is None else {"fitted": self.recovery.headline}),
            "SQNR": self._sqnr,
            "size": self._size,
            **({} if self.speed is None else {"speed": str(self.speed)}),
            "time": ", ".join(f"{step.name} {step.seconds:.2f} s" for step in self.steps),
        }

    def sections(self) -> list[Section]:
        """Tables with all their rows; empty ones are omitted."""
        techniques = {row.node: row.technique for row in self.coverage.rows}
        layers = (
            [] if self.comparison is None else [_layer_cells(row, techniques) for row in self.comparison.costliest()]
        )
        head, cells = with_techniques(
            ("node", "op", "rule", TECHNIQUE, "module", COSTS, "alone, dB", "here, dB"), layers
        )
        floats = [(row.node, row.op, row.module, row.reason) for row in self.coverage.rows_for(Verdict.FLOAT)]
        noted = [(entry.name, "; ".join(entry.notes)) for entry in self.log if entry.notes and not entry.judgments]
        title = "what each quantized op costs, the worst first"
        every = [
            Section(title, head, tuple(cells), "result.report.comparison.costliest()", len(head) - 3),
            Section(
                "left float", ("node", "op", "module", "why"), tuple(floats), "result.report.coverage.rows_for('float')"
            ),
            Section(
                "weights fitted to the data",
                HEAD,
                () if self.recovery is None else tuple(self.recovery.rows()),
                "result.prepared.recovery()",
                3,
            ),
            Section("what was done", ("pass", "notes"), tuple(noted), "result.program.log"),
        ]
        return [section for section in every if section.rows]

    @property
    def notes(self) -> tuple[str, ...]:
        """Further notes."""
        found, seen = self.comparison, self.calibration
        unseen = () if seen is None else (*seen.notes, *(f"no batch reached {group}" for group in seen.unseen))
        return (*unseen, *(() if found is None else found.notes))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Likely problems of accuracy or speed: shown before everything else."""
        found = () if self.comparison is None else findings(self.comparison, self._measured_data)
        slower = () if self.speed is None else self.speed.warnings
        far = (each.told(self._measured_data) for each in self.outside)
        return (*far, *found, *self._unjudged, *self.coverage.warnings, *slower)

    @property
    def _unjudged(self) -> tuple[str, ...]:
        if self.recovery is None or self.calibration is None or self.calibration.batches > 1:
            return ()
        return ("there was one batch, so nothing that was to win back accuracy could be judged: give two at least",)

    def show(self, screen: Screen, extra: Mapping[str, str] | None = None) -> None:
        """Print it, with `extra` lines at the top."""
        for text in self.warnings:
            screen.text(f"warning: {text}")
        screen.fields(self.title, self.fields(extra))
        for section in self.sections():
            screen.table(section.title, section.columns, section.rows[:MAX_ROWS])
            if len(section.rows) > MAX_ROWS:
                screen.text(f"  … and {len(section.rows) - MAX_ROWS} more: {section.all_of_them}")
        for note in self.notes:
            screen.text(f"note: {note}")

    def to_html(self, extra: Mapping[str, str] | None = None) -> str:
        """HTML page with every row of every table."""
        return page(self.title, self.fields(extra or {}), self.sections(), self.warnings, self.notes)

    @property
    def _calibration_data(self) -> str:
        if self.calibration is not None:
            return _count_text(self.calibration.batches)
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
        return f"{format_sqnr(self.comparison.sqnr)} dB over {self._measured_data}"

    @property
    def _measured_data(self) -> str:
        """Data that the numbers were measured on."""
        if self.comparison is None or self.measured_on != "batches":
            return EXAMPLES
        count = self.comparison.batches
        if not self.is_held_out:
            return f"{_count_text(count)} that calibration saw"
        return _count_text(count) if self.calibration is None else _count_text(count, "held-out ")

    def __str__(self) -> str:
        text = StringIO()
        self.show(Screen(Console(file=text, highlight=False, force_terminal=False)))
        return text.getvalue().rstrip("\n")


def _layer_cells(layer: Layer, techniques: Mapping[str, str]) -> tuple[str, ...]:
    technique = techniques.get(layer.node, "")
    numbers = (format_gain(layer.gain), format_sqnr(layer.local), format_sqnr(layer.sqnr))
    return layer.node, layer.op, layer.rule, technique, layer.module, *numbers


def _quotient(before: float, after: float) -> float:
    return before / after if after else math.inf


def _time_text(milliseconds: float) -> str:
    """A time with all its digits."""
    return f"{milliseconds:.{DIGITS}g}"


def _count_text(batches: int, kind: str = "") -> str:
    return f"1 {kind}batch" if batches == 1 else f"{batches} {kind}batches"
