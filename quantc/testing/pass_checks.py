"""Checks of a pass: it is truthful and idempotent, keeps its promise about numbers, and has a text form."""

from __future__ import annotations

from collections.abc import Mapping

from quantc.errors import QuantcError, RefusedError
from quantc.hooks import Truth, Verify
from quantc.ir.program import Program
from quantc.pipeline.numeric_guard import Guard
from quantc.pipeline.pipeline import Hook, Pass, Pipeline
from quantc.pipeline.registry import PASSES
from quantc.testing.conformance import Check, Conformance, Fault, Ledger, raised
from quantc.testing.example_programs import Example, programs_at
from quantc.text.digests import constants
from quantc.text.parser import parse

NOUN = "pass"


def check_pass(given: Pass | type[Pass], examples: Mapping[str, Example]) -> Conformance:
    """Run a pass on the example programs of every stage at which it can run, and on those given."""
    ledger = Ledger("" if isinstance(given, type) else given.name, noun=NOUN)
    if isinstance(given, type):
        ledger.backend = str(getattr(given, "name", given.__name__))
        try:
            given = given()
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises is what is to be reported
            fault = Fault(
                f"it cannot be made: {error}", f"check it with its options: check_backend({ledger.backend}(...))"
            )
            ledger.add("", Check.RUNS, [fault])
            return ledger.conformance(())
    ledger.add("", Check.PIPELINE_TEXT, _text(given))
    for label, program in programs_at(given.needs, given.before, examples):
        _check_on(given, program, label, ledger)
    if ("", Check.TAKEN) not in ledger.entries:
        advice = (
            f'give a model that it changes: check_backend({type(given).__name__}(), examples={{"mine": make_model}})'
        )
        ledger.add("", Check.TAKEN, [Fault("it changes none of the example programs", advice)])
    return ledger.conformance(())


def _text(given: Pass) -> list[Fault]:
    """Pipeline text reads back as the same pass."""
    text, kind = str(given), type(given)
    is_known = given.name in PASSES
    if is_known and PASSES[given.name] is not kind:
        what = f"{given.name} is a pass of {PASSES.provider(given.name)} already"
        return [Fault(what, "give it another name")]
    try:
        if not is_known:
            PASSES.register(given.name, kind)
        again = Pipeline.parse(text).passes
    except (QuantcError, ValueError) as error:
        return [raised(f"its text {text!r} does not read", error)]
    finally:
        if not is_known:
            PASSES.forget(given.name)
    if again == (given,):
        return []
    shown = ",".join(map(str, again))
    return [
        Fault(f"its text {text!r} reads as {shown!r}, another pass", "let options be numbers, text and tuples of these")
    ]


def _check_on(given: Pass, program: Program, label: str, ledger: Ledger) -> None:
    """The checks on one program. The first one that fails ends them."""
    twin = program.clone()
    before = _state(twin)
    for check, hooks in _hooks().items():
        copy = twin if check is Check.RUNS else program.clone()
        faults = _run(given, copy, hooks)
        ledger.add("", check, faults, where=label)
        if check is Check.RUNS and _state(twin) != before:
            ledger.add("", Check.TAKEN, [], where=label)
        if faults:
            return
    ledger.add("", Check.IDEMPOTENT, _again(given, twin), where=label)
    ledger.add("", Check.TEXT, _reads(twin), where=label)


def _hooks() -> dict[Check, tuple[Hook, ...]]:
    """The hooks that watch the pass, by check."""
    return {
        Check.RUNS: (),
        Check.VERIFIES: (Verify(),),
        Check.TRUTHFUL: (Truth(),),
        Check.PROMISE: (Guard(limit=None),),
    }


def _run(given: Pass, program: Program, hooks: tuple[Hook, ...]) -> list[Fault]:
    try:
        Pipeline((given,)).run(program, hooks)
    except RefusedError:
        return []  # it may refuse a program, with a reason
    except QuantcError as error:
        return [raised("", error)]
    return []


def _state(program: Program) -> str:
    return f"{program.dump()}\n{program.plan}"


def _again(given: Pass, program: Program) -> list[Fault] | None:
    if given.before is not None and program.stage >= given.before:
        return None  # it cannot run again
    before = _state(program)
    try:
        Pipeline((given,)).run(program)
    except RefusedError:
        return []
    except QuantcError as error:
        return [raised("the second time", error)]
    if _state(program) == before:
        return []
    return [
        Fault("running it again changes the program once more", "let it go on until nothing is left, or leave it alone")
    ]


def _reads(program: Program) -> list[Fault]:
    """The program after the pass reads back from its text."""
    text = program.dump()
    try:
        again = parse(text, constants(program))
    except QuantcError as error:
        return [raised("the program that it leaves does not read back from its text", error)]
    if again.dump() == text:
        return []
    return [Fault("the program that it leaves reads back as another one", "make nodes with program.emit alone")]
