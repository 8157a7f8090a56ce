"""`check_backend`: models for every rule of a backend, and every check on each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import Backend, TableQuantizer, quantizer_of
from quantc.errors import PatternError, QuantcError, suggest
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.patterns.operand_patterns import LeafKind
from quantc.patterns.table import Rule
from quantc.spec.formats import Offer
from quantc.support.progress import Style, Told, show_progress
from quantc.testing import integer_checks, kernel_checks, number_checks, onnx_checks, placement_checks, technique_checks
from quantc.testing.choices import Choices, NoExampleError
from quantc.testing.conformance import Check, Conformance, Fault, Ledger
from quantc.testing.synthesis import Model, draw, leaves_of, models_of
from quantc.testing.table_checks import check_table
from quantc.testing.trial import Standing, Subject, Trial, activations_of, quantizer_for
from quantc.verbs.capture import capture
from quantc.verbs.prepare import prepare

Example: TypeAlias = "Callable[[], Program | tuple[nn.Module, tuple[Any, ...]]]"
"""Makes a model that a rule is to take: a module with its example inputs, or a program."""

Look: TypeAlias = "Callable[[Trial], list[Fault] | None]"
"""Looks at a model and gives what is wrong; None if there is nothing to look at."""

EACH_MODEL: dict[Check, Look] = {
    Check.OPERANDS: placement_checks.operands,
    Check.PLACED: placement_checks.placed,
    Check.ZERO: placement_checks.zero,
    Check.SHARING: placement_checks.sharing,
    Check.RANGE: number_checks.fixed_range,
    Check.BIAS: placement_checks.bias,
    Check.FIDELITY: number_checks.fidelity,
    Check.INTEGER_FORM: integer_checks.integer_form,
}
EACH_OP: dict[Check, Look] = {
    Check.SHARING: number_checks.ties,
    Check.CHANNELS: number_checks.channels,
    Check.NAMED: technique_checks.named,
    Check.DYNAMIC: technique_checks.dynamic,
    Check.WEIGHT_ONLY: technique_checks.weight_only,
    Check.KERNELS: kernel_checks.on_kernels,
    Check.ONNX: onnx_checks.onnx_form,
    Check.BATCHES: number_checks.batches,
}
"""Dearer ones, made once for each combination of ops."""


def check_backend(
    backend: str | Backend, *, examples: Mapping[str, Example] | None = None, progress: Style | Told = "silent"
) -> Conformance:
    """Check that a backend does what its table says, on models made for each of its rules.

    Programs are converted as for users, so that they are held to the invariants of the target of the same name.

    `examples` maps rule names to functions that make a model, for rules whose models cannot be made from the pattern
    alone: each returns a module and its example inputs, or a `Program`.
    """
    given = _backend(backend)
    ledger = Ledger(given.name)
    own = dict(examples or {})
    for name in own:
        if name not in given.table:
            advice = suggest(name, given.table.names, noun="rules")
            raise PatternError(f"backend {given.name!r} has no rule {name!r} to give an example for", advice=advice)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        check_table(given, ledger)
        subject = Subject(given)
        rules = list(subject.demanded.table)
        with show_progress(f"checking {given.name}", progress, unit="rules") as told:
            for done, rule in enumerate(rules):
                told(done, len(rules))
                _RuleCheck(subject, rule, ledger).run(own.get(rule.name))
            told(len(rules), len(rules))
    return ledger.conformance(given.table.names)


def _backend(given: str | Backend) -> Backend:
    quantizer = quantizer_of(given)
    if isinstance(quantizer, TableQuantizer):
        return quantizer.backend
    raise PatternError(f"{given!r} has no table to check", advice="give a Backend, or the name of one")


class _RuleCheck:
    """The checks of one rule."""

    def __init__(self, subject: Subject, rule: Rule, ledger: Ledger) -> None:
        self.subject = subject
        self.backend = subject.demanded
        self.rule = rule
        self.ledger = ledger
        self.verdicts: list[tuple[Trial, Standing]] = []

    def run(self, example: Example | None) -> None:
        models = self._models(example)
        taken = [trial for model in models if (trial := self._trial(model)) is not None]
        self._note_taken()
        seen: set[str] = set()
        for trial in taken:
            ops = trial.model.label.partition(" (")[0]
            self._check_model(trial, EACH_OP if ops not in seen else {})
            seen.add(ops)
        for trial in dict.fromkeys([*taken[:1], *taken[-1:]]):  # a given model is the last
            self._check_once(trial)
        self._check_strays()

    def _models(self, example: Example | None) -> list[Model]:
        """Those made from the pattern, and the one that was given. A given one makes up for what could not be made."""
        explored = models_of(self.rule, self._activations())
        models = [model for _, model in explored.made]
        faults = [Fault(f"{gap.option}: {gap.error.what}", self._advice()) for gap in explored.unshown]
        if example is not None:
            models.append(_given(example))
            faults = []
        self.ledger.add(self.rule.name, Check.MODELS, faults, note=f"{len(models)} models")
        return models

    def _activations(self) -> frozenset[str]:
        """The names whose roles are those of activations."""
        return activations_of(self.backend, self.rule)

    def _advice(self) -> str:
        return f'give a model that it takes: check_backend(backend, examples={{"{self.rule.name}": make_model}})'

    def _trial(self, model: Model) -> Trial | None:
        """A model that was prepared, if the rule took it."""
        try:
            trial = Trial.of(self.subject, self.rule, model)
            standing = trial.verdict.standing
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is what is to be reported
            self.ledger.add(self.rule.name, Check.RUNS, [_raised("prepare", error)], where=model.label)
            return None
        self.verdicts.append((trial, standing))
        return trial if standing is Standing.TAKEN else None

    def _note_taken(self) -> None:
        if self.rule.static is Offer.NO:
            return  # models are made for scales that are known beforehand
        taken = [trial for trial, standing in self.verdicts if standing is Standing.TAKEN]
        missed = [trial for trial, standing in self.verdicts if standing is Standing.MISSED]
        rest = [(trial, standing) for trial, standing in self.verdicts if trial not in taken and trial not in missed]
        faults = [
            Fault(f"the rule does not take it: {trial.verdict.reason}", _MISSED, trial.model.label) for trial in missed
        ]
        if self.verdicts and not taken and not missed:
            faults = [_dead(*rest[0], self._advice())]
        notes = [f"{trial.model.label} is {standing.value} ({trial.verdict.reason})" for trial, standing in rest]
        if self.verdicts:
            self.ledger.add(self.rule.name, Check.TAKEN, faults, note="; ".join(notes))

    def _check_model(self, trial: Trial, dearer: Mapping[Check, Look]) -> None:
        label = trial.model.label
        try:
            trial.converted.verify()
            trial.converted.run_flat(trial.inputs)
            faults: list[Fault] = []
        except Exception as error:  # noqa: BLE001 - as above
            faults = [_raised("calibrate and convert", error)]
        self.ledger.add(self.rule.name, Check.RUNS, faults, where=label)
        if faults:
            return
        for checks in (EACH_MODEL, dearer):
            for check, look in checks.items():
                self.ledger.add(self.rule.name, check, _looked(look, trial), where=label)

    def _check_once(self, trial: Trial) -> None:
        once: dict[Check, Look] = {
            Check.INTEGERS: _takes_integers,
            Check.REPEATABLE: _not_repeated,
            Check.UNCHANGED: _changed,
        }
        for check, look in once.items():
            self.ledger.add(self.rule.name, check, _looked(look, trial), where=trial.model.label)

    def _check_strays(self) -> None:
        """Operands with the role of weights, in a model where they are activations."""
        activations = self._activations()
        for leaf in leaves_of(self.rule.pattern):
            if leaf.kind is not LeafKind.VALUE or leaf.name not in self.rule.roles or leaf.name in activations:
                continue
            try:
                model = draw(self.rule, Choices(), activations | {leaf.name})
            except NoExampleError:
                continue
            trial = self._trial(model)
            if trial is not None:
                where = f"{model.label}, {leaf.name} from outside"
                self.ledger.add(self.rule.name, Check.OPERANDS, placement_checks.operands(trial), where=where)


_MISSED = "look at the reason; the pattern or the roles ask for something that no such model has"


def _dead(trial: Trial, standing: Standing, advice: str) -> Fault:
    reason = trial.verdict.reason
    if standing is Standing.OTHER:
        what = f"the rule is dead: {reason} takes everything it could take"
        return Fault(what, f"leave it out, let it come first, or {advice}", trial.model.label)
    if standing is Standing.GONE:
        what = f"the rule is dead: its ops do not outlive preparation ({reason})"
        return Fault(what, "write the pattern for what is left of them", trial.model.label)
    return Fault(f"its condition refuses every model made for it: {reason}", advice, trial.model.label)


def _raised(step: str, error: Exception) -> Fault:
    what = error.what if isinstance(error, QuantcError) else f"{type(error).__name__}: {error}"
    where = error.where if isinstance(error, QuantcError) and error.where else ""
    advice = error.advice if isinstance(error, QuantcError) and error.advice else ""
    return Fault(f"{step}: {what.splitlines()[0]}", advice, where)


def _looked(look: Look, trial: Trial) -> list[Fault] | None:
    try:
        return look(trial)
    except Exception as error:  # noqa: BLE001 - what cannot even be looked at is not right
        return [_raised("the check itself failed", error)]


def _given(example: Example) -> Model:
    made = example()
    if isinstance(made, Program):
        return Model("the model given", made)
    module, inputs = made
    return Model("the model given", capture(module, inputs).eval())


def _takes_integers(trial: Trial) -> list[Fault] | None:
    """The same program with whole numbers in place of floats: nothing of it may be taken."""
    if not trial.rule.roles:
        return None
    program = replace(trial.prepared.clone(), plan=Plan())
    for node in program.nodes():
        kind = node.meta.get("val")
        if isinstance(kind, TensorType) and kind.dtype.is_floating_point:
            node.meta["val"] = TensorType(torch.int64, kind.shape)
    quantizer_for(trial.backend, trial.rule).annotate(Annotator(program))
    taken = [node.name for node, claim in program.plan.claims.rows.items() if claim.rule == trial.rule.name]
    if not taken:
        return []
    what = f"the rule takes {', '.join(taken)} when the tensors are of whole numbers"
    return [Fault(what, "give roles to the operands, so that their dtype is looked at")]


def _not_repeated(trial: Trial) -> list[Fault]:
    again = prepare(trial.model.program, quantizer_for(trial.backend, trial.rule), allow_empty=True)
    if str(again.plan) == str(trial.prepared.plan):
        return []
    return [Fault("preparing it twice gives two plans", "let conditions depend on nothing but the match")]


def _changed(trial: Trial) -> list[Fault]:
    """Fault if the captured program was modified since it was made."""
    before = trial.model.text
    if trial.model.program.dump() == before:
        return []
    return [Fault("the captured program was changed", "let passes and conditions work on what they are given only")]
