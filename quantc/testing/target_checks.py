"""Checks of a target: it is ready, holds its invariants, lowers what it was made for, and writes files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from quantc import pipelines
from quantc.annotate.quantizer import Backend, TableQuantizer, quantizer_of, target_of
from quantc.calibration.graph_observers import read_observers
from quantc.errors import PluginError, QuantcError
from quantc.files.atomic_file import write_text
from quantc.integer.semantics import rows_at
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pipeline
from quantc.pipeline.registry import BACKENDS
from quantc.targets.target import Target
from quantc.testing.conformance import TARGET, Check, Conformance, Fault, Ledger, raised
from quantc.testing.example_programs import Example, feed, float_programs
from quantc.testing.number_checks import DB_A_BIT
from quantc.testing.rule_trial import Subject, calibrate_trial, sqnr, trials_of
from quantc.verbs.prepare import prepare

NOUN = "target"
RULE = "rule "
SANE = DB_A_BIT * 8


def check_target(target: Target, examples: Mapping[str, Example]) -> Conformance:
    """Lower a program for every rule of the backend of the same name, the example programs, and those given."""
    ledger = Ledger(target.name, noun=NOUN)
    backend = backend_for(target)
    if backend is None:
        advice = (
            f"register the backend too: BACKENDS.register({target.name!r}, BACKEND), or the entry point quantc.backends"
        )
        ledger.add("", Check.TAKEN, [Fault(f"there is no backend {target.name!r} whose programs it lowers", advice)])
    run_checks(target, backend, ledger, "", examples)
    return ledger.conformance(())


def run_checks(
    target: Target, backend: Backend | None, ledger: Ledger, rule: str, examples: Mapping[str, Example]
) -> None:
    """The rows of a target, under a name: its own report has none, and that of its backend TARGET."""
    faults = _ready(target)
    ledger.add(rule, Check.READY, faults)
    if target.pipeline:
        ledger.add(rule, Check.PIPELINE_TEXT, _pipeline(target))
    if faults or backend is None:
        return
    for label, calibrated in _calibrated(backend, examples):
        _check_on(target, _converted(calibrated), ledger, rule, label)


def backend_for(target: Target) -> Backend | None:
    """The backend whose programs a target lowers: that of its name, or one that names it."""
    usable = dict(BACKENDS.usable())
    found = usable.get(target.name) or next((each for each in usable.values() if target_of(each) == target.name), None)
    quantizer = None if found is None else quantizer_of(found)
    return quantizer.backend if isinstance(quantizer, TableQuantizer) else None


def _ready(target: Target) -> list[Fault]:
    try:
        target.check_ready()
        if target.arithmetic.semantics:
            rows_at(target.arithmetic.semantics)
    except QuantcError as error:
        return [raised("", error)]
    return []


def _pipeline(target: Target) -> list[Fault]:
    try:
        Pipeline.parse(target.pipeline)
    except QuantcError as error:
        return [raised(f"its pipeline {target.pipeline!r} does not read", error)]
    return []


def _calibrated(backend: Backend, examples: Mapping[str, Example]) -> Iterator[tuple[str, Program]]:
    """Programs prepared for a backend and calibrated."""
    subject = Subject(backend)
    for rule in backend.table:
        for trial in trials_of(subject, rule)[:1]:
            yield f"{RULE}{rule.name}: {trial.model.label}", calibrate_trial(trial.prepared.clone(), trial.inputs)
    for name, program in float_programs(examples):
        prepared = prepare(program, backend, allow_empty=True)
        if prepared.plan.claims.rows:
            yield name, feed(prepared)


def _converted(prepared: Program) -> Program:
    """Converted, and not held to invariants yet."""
    copy = prepared.clone()
    read_observers(copy)
    return pipelines.convert(copy.plan.quantizer).run(copy)


def _check_on(target: Target, program: Program, ledger: Ledger, rule: str, label: str) -> None:
    before = program.dump()
    ledger.add(rule, Check.INVARIANTS, _invariants(target, program), where=label)
    ledger.add(rule, Check.UNCHANGED, _changed("an invariant", program, before), where=label)
    try:
        made = target.function(program)
        target.check_artifact(made)
    except QuantcError as error:
        is_its_own = label.startswith(RULE) or isinstance(error, PluginError)
        ledger.add(rule, Check.RUNS, [raised("lower", error)] if is_its_own else None, where=label)
        return  # it may refuse what no rule of the backend promises, such as a branch
    except Exception as error:  # noqa: BLE001 - whatever a plugin raises is what is to be reported
        ledger.add(rule, Check.RUNS, [raised("lower", error)], where=label)
        return
    ledger.add(rule, Check.UNCHANGED, _changed("lowering", program, before), where=label)
    ledger.add(rule, Check.RUNS, [], where=label)
    ledger.add(rule, Check.ARTIFACT, _saved(target, made), where=label)
    ledger.add(rule, Check.FIDELITY, _numbers(program, made), where=label)


def _invariants(target: Target, program: Program) -> list[Fault] | None:
    if not target.invariants:
        return None
    try:
        return [
            Fault(
                broken,
                "let the rules of the backend leave it float, or its roles say it (scale_bits, like); or mend the invariant",
            )
            for each in target.invariants
            for broken in each.broken(program, target.name)
        ]
    except QuantcError as error:
        return [raised("", error)]


def _changed(who: str, program: Program, before: str) -> list[Fault]:
    if program.dump() == before:
        return []
    return [
        Fault(
            f"{who} changes the program that it is given", "work on program.clone(), or pipeline.run_on_copy(program)"
        )
    ]


def _saved(target: Target, made: Any) -> list[Fault] | None:
    """The protocol of artifacts, and whether the target knows its own files."""
    if not target.suffix:
        return None
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"model{target.suffix}"
        try:
            target.data_of(made)
            target.save(made, path)
        except QuantcError as error:
            return [raised("", error)]
        if target.recognizes is not None and not target.is_own_file(path):
            return [
                Fault(
                    "it does not recognize the file that it wrote", "correct `recognizes`: such files are not replaced"
                )
            ]
        if target.recognizes is not None:
            other = Path(folder) / f"other{target.suffix}"
            write_text(other, "another file")
            if target.is_own_file(other):
                return [Fault("it takes any file for its own", "let `recognizes` look at the first bytes")]
    return []


def _numbers(program: Program, made: Any) -> list[Fault] | None:
    """A callable artifact gives the program's results."""
    if not callable(made) or program.example_inputs is None:
        return None
    args, kwargs = pytree.tree_unflatten(list(program.example_inputs), program.signature.in_spec)
    try:
        found = pytree.tree_leaves(made(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - as above
        return [raised("calling what it gives", error)]
    expected = pytree.tree_leaves(program(*args, **kwargs))
    shapes = [getattr(value, "shape", None) for value in found], [value.shape for value in expected]
    if shapes[0] != shapes[1]:
        return [
            Fault(f"what it gives yields {shapes[0]}, and the program {shapes[1]}", "return the outputs of the program")
        ]
    pairs = [(a.double(), b.double()) for a, b in zip(expected, found, strict=True) if isinstance(a, Tensor)]
    decibel = sqnr((a for a, _ in pairs), (b for _, b in pairs))
    if decibel >= SANE:
        return []
    return [
        Fault(f"what it gives is {decibel:.1f} dB from the Q/DQ form, and {SANE:.0f} are expected", "see qc.agreement")
    ]


__all__ = ["TARGET", "backend_for", "check_target", "run_checks"]
