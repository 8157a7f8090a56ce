"""Checks which rules of a backend run on kernels, and those that claim to.

    print(check_kernels("x86"))

A rule runs on kernels if, for every model the kit makes for it, each of its quantized ops is run by a kernel of the
target, or by ATen's own op on 8-bit tensors; if each kernel is within a step of the integer form; and if nothing
between two quantized ops becomes float only to be rounded again. That is checked for every technique of the rule:
static, dynamic and weight-only, as in the backend's modes.
"""

from __future__ import annotations

import json
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeAlias

from quantc.annotate.quantizer import Backend, TableQuantizer, quantizer_of
from quantc.errors import PatternError, QuantcError, suggest
from quantc.integer.library import OPS
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.patterns.table import Rule
from quantc.spec.formats import Offer, Role, Timing
from quantc.spec.spec import QuantSpec, name_of
from quantc.support.terminal import plain_rows
from quantc.targets.kernels.kernel_agreement import kernel_agreement
from quantc.targets.kernels.kernel_table import KERNELS
from quantc.targets.kernels.lowered import Lowered, lower
from quantc.testing.conformance import Fault
from quantc.testing.integer_checks import reading_floats
from quantc.testing.loose_pairs import loose_pairs
from quantc.testing.rule_trial import Subject, Trial, calibrate_trial, scale_inputs, trials_of
from quantc.testing.technique_checks import asked_for, specs_of
from quantc.verbs.convert import convert

KERNEL = "kernel"
MAX_STEPS = 1
FLOAT_ERROR = 2e-6
"""Allowed float error, relative to the largest value: kernels sum in float32, the integer form in float64."""
RUN_TIME_ERROR = 2 / 127
"""The same where scales are found as the program runs: kernels add biases in float32, and the integer form in steps; and
a number, or a state, halfway between two levels may go to either."""
FACTORS = (1.0, 8.0)
"""Scales of the inputs relative to those of calibration: the second saturates every grid."""

OTHERS = (Timing.DYNAMIC, Timing.WEIGHT_ONLY)
"""The techniques that a rule is asked for by a config."""

Specs: TypeAlias = "Callable[[Trial, Timing], Sequence[QuantSpec]]"
"""The specs that a technique is tried with."""
Judge: TypeAlias = "Callable[[Trial, Program, str, Timing], list[Fault]]"
"""Faults of a prepared program, given its trial, origin and technique."""


def specs_of_modes(trial: Trial, timing: Timing) -> list[QuantSpec]:
    """Specs of the backend's mode of that name for the rule, if any."""
    modes, is_asked = trial.subject.given.modes, timing is not Timing.DYNAMIC or trial.rule.dynamic is Offer.YES
    return [modes[timing.value]] if timing.value in modes and is_asked else []


def specs_taken(trial: Trial, timing: Timing) -> list[QuantSpec]:
    """One spec of each dtype, and one of each granularity, that a config can request for the rule."""
    if timing is Timing.DYNAMIC and trial.rule.dynamic is Offer.NO:
        return []
    return specs_of(trial.subject.given, Role.WEIGHT if timing is Timing.WEIGHT_ONLY else Role.ACT, timing)


def one_for_each_op(trials: Sequence[Trial]) -> list[Trial]:
    """The first of the models that differ in an option alone."""
    return list({trial.model.label.partition(" (")[0]: trial for trial in reversed(trials)}.values())[::-1]


# -- the report ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One rule and one technique, with the faults that keep it from kernels."""

    rule: str
    timing: Timing
    programs: int
    """Number of programs lowered."""
    faults: tuple[Fault, ...] = ()

    @property
    def passed(self) -> bool:
        return self.programs > 0 and not self.faults

    @property
    def why_not(self) -> str:
        if self.passed:
            return ""
        return f"{self.faults[0].where}: {self.faults[0].what}" if self.faults else "no model was made for it"


@dataclass(frozen=True)
class KernelReport:
    """Rules of a backend on the kernels of a target. Prints as a table."""

    backend: str
    target: str
    rows: tuple[KernelRow, ...]
    claimed: frozenset[str]
    """The rules that claim kernels."""

    @property
    def carried(self) -> frozenset[str]:
        """Rules that run on kernels with every technique they support."""
        return frozenset(row.rule for row in self.rows) - {row.rule for row in self.rows if not row.passed}

    @property
    def false_claims(self) -> tuple[KernelRow, ...]:
        return tuple(row for row in self.rows if row.rule in self.claimed and not row.passed)

    @property
    def missing_claims(self) -> tuple[str, ...]:
        """Rules that could claim kernels, and do not."""
        return tuple(sorted(self.carried - self.claimed))

    def row(self, rule: str, timing: Timing = Timing.STATIC) -> KernelRow | None:
        return next((row for row in self.rows if row.rule == rule and row.timing is timing), None)

    def to_json(self) -> str:
        head: dict[str, Any] = {"backend": self.backend, "target": self.target, "carried": sorted(self.carried)}
        return json.dumps({**head, "rows": [asdict(row) for row in self.rows]}, indent=2, ensure_ascii=False)

    def __str__(self) -> str:
        rules = dict.fromkeys(row.rule for row in self.rows)
        head = f"{self.backend} on the kernels of {self.target}: {len(self.carried)} of {len(rules)} rules run on them"
        columns = ("rule", "technique", "programs", "claimed", "why not")
        cells = [
            (row.rule, row.timing.value, str(row.programs), "yes" if row.rule in self.claimed else "", row.why_not)
            for row in self.rows
        ]
        return "\n".join([head, *plain_rows(columns, cells)])


def check_kernels(
    backend: str | Backend,
    target: str | None = None,
    *,
    rules: Sequence[str] = (),
    models: Callable[[Sequence[Trial]], Sequence[Trial]] = list,
    specs: Specs = specs_of_modes,
) -> KernelReport:
    """Lower the kit's models for the rules of a backend, and report which of them run on kernels.

    `target` names the kernels, if not the backend's own; `rules` selects some instead of all. `models=one_for_each_op`
    omits models that differ in an option alone, which is faster; `specs=specs_taken` tries each technique with every
    spec that the backend supports, not with its modes' alone.
    """
    quantizer = quantizer_of(backend)
    if not isinstance(quantizer, TableQuantizer):
        raise PatternError(f"{backend!r} has no table to check", advice="give a Backend, or the name of one")
    given = quantizer.backend
    for name in rules:
        if name not in given.table:
            advice = suggest(name, given.table.names, noun="rules")
            raise PatternError(f"backend {given.name!r} has no rule {name!r}", advice=advice)
    subject, target = Subject(given), target or given.name
    chosen = [rule for rule in subject.demanded.table if not rules or rule.name in rules]
    judge = partial(_lowered, target=target)
    rows = [row for rule in chosen for row in rows_of(models(trials_of(subject, rule)), rule, judge, specs)]
    claimed = frozenset(rule.name for rule in given.table if KERNEL in rule.supports)
    return KernelReport(given.name, target, tuple(rows), claimed)


def rows_of(trials: Sequence[Trial], rule: Rule, judge: Judge, specs: Specs) -> Iterator[KernelRow]:
    """Judgement of a rule, for each technique it supports."""
    if rule.static is not Offer.NO:
        found = [_static(trial, judge) for trial in trials]
        yield KernelRow(rule.name, Timing.STATIC, len(found), tuple(fault for faults in found for fault in faults))
    for timing in OTHERS:
        asked = [faults for trial in one_for_each_op(trials) for faults in _asked(trial, timing, judge, specs)]
        if asked:
            yield KernelRow(rule.name, timing, len(asked), tuple(fault for faults in asked for fault in faults))


def on_kernels(trial: Trial) -> list[Fault] | None:
    """Conformance check: a rule that claims kernels runs on those of its backend, with each of its techniques."""
    if KERNEL not in trial.rule.supports:
        return None
    target = trial.backend.name
    if target not in KERNELS:
        return [Fault(f"the rule claims kernels, and quantc has none for {target}", _CLAIM)]
    judge = partial(_lowered, target=target)
    found = [_static(trial, judge)]
    found += [faults for timing in OTHERS for faults in _asked(trial, timing, judge, specs_of_modes)]
    return [fault for faults in found for fault in faults]


_CLAIM = 'leave "kernel" out of the rule\'s `supports`, or offer a kernel for the op'
_KERNEL = "correct the kernel: it is held to the integer form"


# -- one program ---------------------------------------------------------------------------------------------------


def _static(trial: Trial, judge: Judge) -> list[Fault]:
    prepared = calibrate_trial(trial.prepared.clone(), trial.inputs)
    return judge(trial, prepared, trial.model.label, Timing.STATIC)


def _asked(trial: Trial, timing: Timing, judge: Judge, specs: Specs) -> list[list[Fault]]:
    """The faults of each spec that a technique is tried with; empty if the rule cannot be asked for it."""
    found: list[list[Fault]] = []
    for spec in specs(trial, timing):
        prepared = asked_for(trial, spec)
        if prepared is not None:
            needs_data = any(group.source is Source.DATA for group in prepared.plan.groups)
            ready = calibrate_trial(prepared, trial.inputs) if needs_data else prepared
            found.append(judge(trial, ready, f"{trial.model.label}, {name_of(spec)}", timing))
    return found


def _lowered(trial: Trial, prepared: Program, where: str, timing: Timing, target: str) -> list[Fault]:
    """Faults that keep a program from running entirely on kernels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no op has a kernel is a fault, and told as one
            lowered = lower(convert(prepared, reduce_range="weights"), target)
        in_float = _left_in_float(trial, lowered) if timing is Timing.STATIC else ()
        limit = RUN_TIME_ERROR if timing is Timing.DYNAMIC else FLOAT_ERROR
        faults = [*_as_written(lowered), *in_float, *_loose(lowered), *_apart(trial, lowered, limit)]
    except QuantcError as error:
        faults = [Fault(f"lowering fails: {error.what}", error.advice or "")]
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is what is to be reported
        faults = [Fault(f"lowering fails: {type(error).__name__}: {str(error).partition(chr(10))[0]}", _KERNEL)]
    return [Fault(fault.what, fault.advice, where) for fault in faults]


def _as_written(lowered: Lowered) -> Iterator[Fault]:
    """Ops of the integer form that no kernel runs."""
    if not lowered.placed:
        yield Fault("nothing of it is left to run on kernels", _CLAIM)
    for row in lowered.placed:
        if not row.kernel and row.op in OPS:
            yield Fault(f"{row.op} runs as it is written: {row.reason}", _CLAIM)


def _left_in_float(trial: Trial, lowered: Lowered) -> Iterator[Fault]:
    """Ops of the rule that are computed in float though the table has everything they read quantized."""
    program = lowered.program
    running = {node.name for node in lowered.module.graph.nodes if node.op == "call_function"}
    on_kernels = {row.node for row in lowered.placed if row.kernel}
    claims = program.plan.claims.rows.items()
    mine = [node for node, claim in claims if claim.rule == trial.rule.name and node.target is not operator.getitem]
    left = [node for node in mine if node in program.plan.left_float and node.name in running - on_kernels]
    excused = reading_floats(trial) if len(left) < len(mine) else set[str]()
    for node in left:
        if node.name not in excused:
            yield Fault(f"{node.name} is computed in float: {program.plan.left_float[node]}", _CLAIM)


def _loose(lowered: Lowered) -> Iterator[Fault]:
    for pair in loose_pairs(lowered):
        yield Fault(str(pair), "let the ops on both sides hand on bytes")


def _apart(trial: Trial, lowered: Lowered, limit: float) -> Iterator[Fault]:
    """Kernels that are not what their op is, on inputs of several sizes; each is named once."""
    told: set[str] = set()
    for factor in FACTORS:
        inputs = scale_inputs(trial.inputs, factor)
        for gap in kernel_agreement(lowered, *inputs):
            if gap.node not in told and not (gap.steps <= MAX_STEPS and gap.relative <= limit):
                told.add(gap.node)
                yield Fault(f"the kernel is not what its op is: {gap}", _KERNEL)
        lowered.module(*inputs)


__all__ = [
    "KernelReport",
    "KernelRow",
    "check_kernels",
    "on_kernels",
    "one_for_each_op",
    "rows_of",
    "specs_of_modes",
    "specs_taken",
]
