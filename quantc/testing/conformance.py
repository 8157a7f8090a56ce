"""Conformance report: one row per rule and check."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from quantc.errors import ConformanceError, QuantcError
from quantc.support.terminal import plain_rows


class Check(StrEnum):
    """Conformance checks. Those of a whole backend come first, then those of its rules."""

    JSON = "json"
    """The table can be written as JSON and read back."""
    SPECS = "specs"
    """The backend itself takes the specs of its roles, and they are of a kind that kernels can compute with."""
    MODES = "modes"
    """The backend takes what its modes ask for, and some rule can be asked for it."""
    ROLES = "roles"
    """Every role is used by some rule."""
    SUPPORTS = "supports"
    """The rule says at which levels it can be carried out."""
    MODELS = "models"
    """A model exists for each alternative of the pattern."""
    TAKEN = "taken"
    """The rule takes the models made for it; it is not dead."""
    OPERANDS = "operands"
    """Weights are constants, and have the role of weights; biases that of biases."""
    RUNS = "runs"
    """Preparing, calibrating, converting, verifying and running work."""
    PLACED = "placed"
    """Each operand and output is quantized as its role says."""
    ZERO = "zero"
    """Zero is exact, zero points lie in range, symmetric is symmetric."""
    SHARING = "sharing"
    """Equivalent sites share one scale; ops that only move values keep it; nothing else is tied."""
    RANGE = "range"
    """Fixed qparams cover what the op yields."""
    BIAS = "bias"
    """A quantized bias is int32, on the product of the scales of input and weight."""
    CHANNELS = "channels"
    """The axis of per-channel scales is that of the output channels."""
    FIDELITY = "fidelity"
    """The quantized model is close to the float one."""
    INTEGER_FORM = "integer-form"
    """A rule that claims the integer form gets there: no float inside it, and within a step of Q/DQ."""
    KERNELS = "kernels"
    """A rule that claims kernels runs on them, within a step of the integer form, and never leaves bytes in between."""
    ONNX = "onnx"
    """A rule that claims ONNX, written so and run in ONNX Runtime, is within a step of Q/DQ; unlooked at without it."""
    NAMED = "named"
    """A rule that is for ops a config names takes these, and no others."""
    DYNAMIC = "dynamic"
    """A rule that is dynamic finds its scales as it runs, with every spec that the backend takes for that."""
    WEIGHT_ONLY = "weight-only"
    """A rule with a weight stores it in every format that the backend takes, and computes in float."""
    BATCHES = "batches"
    """The quantized model runs on batches of other sizes."""
    INTEGERS = "integers"
    """Tensors of integers are left alone."""
    REPEATABLE = "repeatable"
    """Preparing twice decides the same."""
    UNCHANGED = "unchanged"
    """Inputs are left as they were: the captured program, the converted one, merged observations."""
    INVARIANTS = "invariants"
    """Converted programs hold the invariants of the target."""

    PIPELINE_TEXT = "pipeline-text"
    """Pipeline text reads back as the same: of a pass, and of a target's pipeline."""
    VERIFIES = "verifies"
    """A pass leaves programs that follow the rules of the IR."""
    TRUTHFUL = "truthful"
    """A pass says truly whether it changed anything."""
    PROMISE = "promise"
    """A pass keeps the numbers as it promises."""
    IDEMPOTENT = "idempotent"
    """Running a pass again changes nothing."""
    TEXT = "text"
    """The program after a pass reads back from its text."""

    READY = "ready"
    """A target can be lowered to here: its function, its packages, the rows of its arithmetic."""
    ARTIFACT = "artifact"
    """An artifact of a target with files can be saved and summarized, and the target recognizes its file."""

    EXPLAINS = "explains"
    """A quantizer explains the nodes that it claims, and lists their ops."""

    MERGES = "merges"
    """Observations whose order is free form a monoid: empty is the identity, and any split gives the same bits."""
    STATE = "state"
    """An observation comes back from its state."""
    QPARAMS = "qparams"
    """An observation gives qparams that the spec allows."""
    REFUSES = "refuses"
    """An observation refuses NaN, no data, and options that it does not have."""


TARGET = "(target)"
"""In place of the rule, in rows about the target of a backend's name."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure, with advice."""

    what: str
    advice: str
    where: str = ""


def raised(step: str, error: Exception) -> Fault:
    """A fault made from an exception."""
    what = error.what if isinstance(error, QuantcError) else f"{type(error).__name__}: {error}"
    where = error.where if isinstance(error, QuantcError) and error.where else ""
    advice = error.advice if isinstance(error, QuantcError) and error.advice else ""
    return Fault(f"{step}: {what}".removeprefix(": ").splitlines()[0], advice, where)


@dataclass(frozen=True, slots=True)
class Row:
    """One check of one rule (an empty name means the backend as a whole)."""

    rule: str
    check: Check
    passed: bool
    models: int
    """Number of models checked."""
    what: str = ""
    """The fault; or, for a check that passed, a note."""
    where: str = ""
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.rule or 'backend'}, {self.check}: {self.what or 'passed'}"
        return "; ".join([text, *(part for part in (self.where, self.advice) if part)])


@dataclass(frozen=True)
class Conformance:
    """Rows of what was checked. Prints as a table; `raise_if_failed()` makes it a test."""

    backend: str
    """The name of it."""
    rows: tuple[Row, ...]
    noun: str = "backend"
    """The kind of it: backend, quantizer, target, pass or observation."""

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.passed)

    def row(self, rule: str, check: Check | str) -> Row | None:
        """Row of a rule and a check; None if the check does not apply."""
        return next((row for row in self.rows if row.rule == rule and row.check == check), None)

    def raise_if_failed(self) -> None:
        """Raise one ConformanceError that lists every failure."""
        if self.passed:
            return
        first = self.failures[0]
        raise ConformanceError(
            f"{self.noun} {self.backend!r} fails {len(self.failures)} of {len(self.rows)} checks",
            [str(row) for row in self.failures],
            where=f"{first.rule or f'the {self.noun} as a whole'}, {first.check}",
            advice=first.advice,
        )

    def to_json(self) -> str:
        data: dict[str, Any] = {"backend": self.backend, "kind": self.noun, "passed": self.passed}
        return json.dumps({**data, "rows": [asdict(row) for row in self.rows]}, indent=2)

    def __str__(self) -> str:
        head = f"{self.backend}: {len(self.rows) - len(self.failures)} of {len(self.rows)} checks passed"
        columns = ("rule" if self.noun == "backend" else "of", "checks passed", "failed")
        by_rule: dict[str, list[Row]] = {}
        for row in self.rows:
            by_rule.setdefault(row.rule, []).append(row)
        cells = [
            (
                rule or f"({self.noun})",
                str(sum(row.passed for row in rows)),
                " ".join(row.check for row in rows if not row.passed) or "-",
            )
            for rule, rows in by_rule.items()
        ]
        lines = [head, *plain_rows(columns, cells)]
        for row in self.failures:
            lines += [f"{row.rule or f'({self.noun})'}, {row.check}: {row.what}"]
            lines += [f"  where: {row.where}"] if row.where else []
            lines += [f"  what to do: {row.advice}"] if row.advice else []
        return "\n".join(lines)


@dataclass
class _Entry:
    models: int = 0
    faults: list[Fault] = field(default_factory=list)
    faulty: int = 0
    note: str = ""


@dataclass
class Ledger:
    """Collects rows while checks run: findings for several models become one row."""

    backend: str
    noun: str = "backend"
    entries: dict[tuple[str, Check], _Entry] = field(default_factory=dict)

    def add(self, rule: str, check: Check, faults: list[Fault] | None, *, where: str = "", note: str = "") -> None:
        """Record a check's findings for one model, named by `where`; None if the check does not apply to it."""
        if faults is None:
            return
        entry = self.entries.setdefault((rule, check), _Entry())
        entry.models += 1
        entry.faulty += bool(faults)
        entry.faults += [Fault(fault.what, fault.advice, fault.where or where) for fault in faults]
        entry.note = note or entry.note

    def conformance(self, rules: tuple[str, ...]) -> Conformance:
        order = {rule: number for number, rule in enumerate(("", *rules, TARGET))}
        checks = list(Check)
        keys = sorted(self.entries, key=lambda key: (order[key[0]], checks.index(key[1])))
        return Conformance(self.backend, tuple(_row(*key, self.entries[key]) for key in keys), self.noun)


def _row(rule: str, check: Check, entry: _Entry) -> Row:
    if not entry.faults:
        return Row(rule, check, True, entry.models, entry.note)
    first = entry.faults[0]
    others = f" (and {entry.faulty - 1} models more)" if entry.faulty > 1 else ""
    others = others or (f" (and {len(entry.faults) - 1} faults more)" if len(entry.faults) > 1 else "")
    return Row(rule, check, False, entry.models, first.what + others, first.where, first.advice)
