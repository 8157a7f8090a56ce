"""`check_backend`: models for every rule of a backend, and every check on each of them; and the checks of other plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import torch

from quantc.annotate.annotator import Annotator
from quantc.annotate.quantizer import Backend, Quantizer, TableQuantizer, quantizer_of, target_of
from quantc.errors import InvariantError, PatternError, suggest
from quantc.ir.plan import Plan
from quantc.ir.types import TensorType
from quantc.patterns.operand_patterns import LeafKind
from quantc.patterns.table import Rule
from quantc.pipeline.base_pass import Pass
from quantc.spec.formats import Offer
from quantc.spec.observation import Observation
from quantc.spec.spec import Option
from quantc.support.progress import Style, Told, show_progress
from quantc.targets.target import TARGETS, Target, is_own, targets_of
from quantc.testing import integer_checks, kernel_checks, number_checks, onnx_checks, placement_checks, technique_checks
from quantc.testing.choices import Choices, NoExampleError
from quantc.testing.conformance import TARGET, Check, Conformance, Fault, Ledger, raised
from quantc.testing.example_programs import Example, as_program
from quantc.testing.observation_checks import check_observation
from quantc.testing.pass_checks import check_pass
from quantc.testing.quantizer_checks import check_quantizer
from quantc.testing.rule_trial import Standing, Subject, Trial, activations_of, quantizer_for
from quantc.testing.synthesis import Model, draw, leaves_of, models_of
from quantc.testing.table_checks import check_table
from quantc.testing.target_checks import check_target, run_checks
from quantc.verbs.prepare import prepare

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


Checked: TypeAlias = "str | Backend | Quantizer | Target | Pass | type[Pass] | type[Observation]"
"""Subjects of the kit. A name is that of a backend."""


def check_backend(
    backend: Checked,
    *,
    examples: Mapping[str, Example] | None = None,
    options: Mapping[str, Option] | None = None,
    progress: Style | Told = "silent",
) -> Conformance:
    """Check that a backend does what its table says, on models made for each of its rules.

    Programs are converted as for users, so that they are held to the invariants of the target of the same name, and
    lowered to it, if it is from outside. `examples` maps rule names to functions that make a model, for rules whose models cannot
    be made from the pattern alone: each returns a module and its example inputs, or a `Program`.

    Quantizers, targets, passes (values, or classes without required options) and classes of observations are checked as
    well, on example programs of many ops and on `examples`, whose names mean nothing then. `options` are those of an
    observation.
    """
    own = dict(examples or {})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if isinstance(backend, Target):
            return check_target(backend, own)
        if isinstance(backend, Pass) or (isinstance(backend, type) and issubclass(backend, Pass)):
            return check_pass(backend, own)
        if isinstance(backend, type):
            return check_observation(backend, dict(options or {}))
        quantizer = quantizer_of(backend)
        if isinstance(quantizer, TableQuantizer):
            return _check_table(quantizer.backend, own, progress)
        return check_quantizer(quantizer, own)


def _check_table(given: Backend, own: Mapping[str, Example], progress: Style | Told) -> Conformance:
    ledger = Ledger(given.name)
    for name in own:
        if name not in given.table:
            advice = suggest(name, given.table.names, noun="rules")
            raise PatternError(f"backend {given.name!r} has no rule {name!r} to give an example for", advice=advice)
    check_table(given, ledger)
    subject = Subject(given)
    rules = list(subject.demanded.table)
    with show_progress(f"checking {given.name}", progress, unit="rules") as told:
        for done, rule in enumerate(rules):
            told(done, len(rules))
            _RuleCheck(subject, rule, ledger).run(own.get(rule.name))
        told(len(rules), len(rules))
    target = target_of(given)
    if target in TARGETS and not is_own(target):
        run_checks(TARGETS[target], given, ledger, TARGET, {})
    return ledger.conformance(given.table.names)


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
            self.ledger.add(self.rule.name, Check.RUNS, [raised("prepare", error)], where=model.label)
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
        except InvariantError as error:
            self.ledger.add(self.rule.name, Check.INVARIANTS, [raised("", error)], where=label)
            return
        except Exception as error:  # noqa: BLE001 - as above
            self.ledger.add(self.rule.name, Check.RUNS, [raised("calibrate and convert", error)], where=label)
            return
        self.ledger.add(self.rule.name, Check.RUNS, [], where=label)
        if any(target.invariants for target in targets_of(trial.prepared)):
            self.ledger.add(self.rule.name, Check.INVARIANTS, [], where=label)
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


def _looked(look: Look, trial: Trial) -> list[Fault] | None:
    try:
        return look(trial)
    except Exception as error:  # noqa: BLE001 - what cannot even be looked at is not right
        return [raised("the check itself failed", error)]


def _given(example: Example) -> Model:
    program = as_program(example)
    return Model("the model given", program.eval() if program.training else program)


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
