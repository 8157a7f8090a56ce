"""One model of one rule, taken through prepare, calibrate and convert."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from quantc.annotate.annotator import Annotator
from quantc.annotate.match_operands import Slot, slots_of
from quantc.annotate.quantizer import ON_DEMAND, PASS, Backend, TableQuantizer
from quantc.annotate.table_annotation import TableAnnotation
from quantc.calibration.interpreter import Runner
from quantc.calibration.loop import calibrate
from quantc.ir.decisions import Quantize
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.patterns.rule_matcher import Match, Matcher, Refusal
from quantc.patterns.table import Roles, Rule
from quantc.spec.formats import Offer, PerTensor, Role, Timing
from quantc.spec.spec import INT8, QuantSpec
from quantc.testing.synthesis import Model, models_of
from quantc.verbs.convert import convert
from quantc.verbs.prepare import prepare

FACTORS = (1.0, 0.9, 0.8)
"""Scale of each calibration batch, relative to the example inputs."""
UNSEEN = 0.95


@dataclass(frozen=True, eq=False)
class Subject:
    """The checked backend, and variants with other outputs; rules that a config has to name apply as if it did."""

    given: Backend

    @cached_property
    def demanded(self) -> Backend:
        """Variant in which every optional quantization is requested."""
        return self._with_roles(lambda name, role: role.removesuffix(ON_DEMAND))

    @cached_property
    def without_outputs(self) -> Backend:
        """Variant with float outputs."""
        return self._with_roles(lambda name, role: role if name != "out" else None)

    def _with_roles(self, change: Callable[[str, str], str | None]) -> Backend:
        rules = []
        for rule in self.given.table:
            roles = {name: new for name, role in rule.roles.items() if (new := change(name, role)) is not None}
            static = Offer.YES if rule.static is Offer.NAMED else rule.static
            rules.append(replace(rule, roles=Roles(roles), static=static))
        return replace(self.given, table=replace(self.given.table, rules=tuple(rules)))


@dataclass(frozen=True)
class Fed(TableQuantizer):
    """Quantizer of a backend for models whose float inputs are quantized, as propagating rules need it."""

    def annotate(self, annotator: Annotator) -> None:
        for node in annotator.program.graph.find_nodes(op="placeholder"):
            if annotator.why_not_tensor(node) is None:
                annotator.output(node, Quantize(_activation(self.backend)))
        super().annotate(annotator)


def _activation(backend: Backend) -> QuantSpec:
    """The backend's activation spec."""
    for name in backend.roles:
        outcome = backend.outcome(name)
        spec = outcome.spec
        is_plain = spec.timing is Timing.STATIC and isinstance(spec.granularity, PerTensor)
        if isinstance(outcome, Quantize) and spec.role is Role.ACT and is_plain:
            return spec
    return INT8


def quantizer_for(backend: Backend, rule: Rule) -> TableQuantizer:
    return Fed(backend) if PASS in rule.roles.values() else TableQuantizer(backend)


class Standing(Enum):
    """Outcome for a model that was made for a rule."""

    TAKEN = "taken"
    OTHER = "taken by another rule"
    REFUSED = "refused by the rule's own condition"
    GONE = "rewritten before annotating"
    MISSED = "missed"


@dataclass(frozen=True)
class Verdict:
    standing: Standing
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Trial:
    """A model, prepared for a backend with all its outputs requested."""

    subject: Subject
    rule: Rule
    model: Model
    prepared: Program

    @staticmethod
    def of(subject: Subject, rule: Rule, model: Model) -> Trial:
        prepared = prepare(model.program, quantizer_for(subject.demanded, rule), allow_empty=True)
        return Trial(subject, rule, model, prepared)

    @property
    def backend(self) -> Backend:
        return self.subject.demanded

    # -- did the rule take it? ---------------------------------------------------------------------------------

    @cached_property
    def match(self) -> Match | None:
        """Match of the rule in the prepared program."""
        annotation = TableAnnotation(self.backend, Annotator(self.prepared, None, Plan()))
        found = self.backend.table.match(self.prepared, annotation.admission).of(self.rule.name)
        return found[0] if found else None

    @cached_property
    def verdict(self) -> Verdict:
        claims = self.prepared.plan.claims
        mine = [node for node, claim in claims.rows.items() if claim.rule == self.rule.name]
        if mine and {node.name for node in mine} >= set(self.model.claimed):
            return Verdict(Standing.TAKEN)
        nodes = {node.name: node for node in self.prepared.graph.nodes}
        present = [nodes[name] for name in self.model.claimed if name in nodes]
        others = {claim.rule for node in present if (claim := claims.get(node)) is not None} - {self.rule.name}
        if others:
            return Verdict(Standing.OTHER, ", ".join(sorted(others)))
        if len(present) < len(self.model.claimed):
            return Verdict(Standing.GONE, self._rewritten_by())
        if not present:
            return Verdict(Standing.MISSED, "the rule fits nowhere in the model that was given")
        return self._missed(present[-1])

    def _rewritten_by(self) -> str:
        names = [entry.name for entry in self.prepared.log if entry.changed]
        return ", ".join(names)

    def _missed(self, root: fx.Node) -> Verdict:
        annotation = TableAnnotation(self.backend, Annotator(self.prepared, None, Plan()))
        matcher = Matcher(self.prepared, annotation.admission)
        outcome = matcher.attempt(self.rule, root)
        if not isinstance(outcome, Refusal):
            left = self.prepared.plan.left_float.get(root)
            return Verdict(Standing.MISSED, left or "it fits, but was not applied")
        unconditional = matcher.attempt(replace(self.rule, when=()), root)
        standing = Standing.REFUSED if isinstance(unconditional, Match) else Standing.MISSED
        return Verdict(standing, outcome.reason)

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Operands of the match, by name."""
        return tuple(slots_of(self.match)) if self.match is not None else ()

    # -- the numbers -------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.prepared.example_inputs or ()

    @cached_property
    def converted(self) -> Program:
        """The quantized model."""
        return quantize_trial(self.prepared.clone(), self.inputs)

    @cached_property
    def bits(self) -> int:
        """Bits of the narrowest tensor the rule quantizes."""
        outcomes = [self.backend.outcome(role) for role in self.rule.roles.values() if role in self.backend.roles]
        return min((outcome.spec.dtype.bits for outcome in outcomes), default=8)


def activations_of(backend: Backend, rule: Rule) -> frozenset[str]:
    """Names in a rule whose roles are not those of weights: they are inputs."""
    own = {name: backend.outcome(role) for name, role in rule.roles.items() if role in backend.roles}
    return frozenset(rule.roles) - {name for name, outcome in own.items() if outcome.spec.role is not Role.ACT}


def trials_of(subject: Subject, rule: Rule) -> tuple[Trial, ...]:
    """Models that can be made from a rule's pattern, as far as the rule takes them."""
    made = models_of(rule, activations_of(subject.demanded, rule)).made
    trials = [Trial.of(subject, rule, model) for _, model in made]
    return tuple(trial for trial in trials if trial.verdict.standing is Standing.TAKEN)


def quantize_trial(prepared: Program, inputs: Sequence[Any]) -> Program:
    """Calibrate a prepared program with batches like `inputs`, and convert it."""
    return convert(calibrate_trial(prepared, inputs))


def calibrate_trial(prepared: Program, inputs: Sequence[Any]) -> Program:
    """Calibrate a prepared program with batches like `inputs`."""
    calibrate(prepared, [tuple(scale_inputs(inputs, factor)) for factor in FACTORS])
    return prepared


def scale_inputs(inputs: Iterable[Any], factor: float) -> list[Any]:
    """Similar inputs: floats scaled, integers unchanged."""
    return [value * factor if isinstance(value, Tensor) and value.is_floating_point() else value for value in inputs]


def run(program: Program, inputs: Sequence[Any]) -> list[Tensor]:
    """Outputs of a program."""
    return [value.double() for value in Runner(program, {}).run(inputs) if isinstance(value, Tensor)]


def values_of(program: Program, nodes: Iterable[fx.Node], inputs: Sequence[Any]) -> list[Tensor]:
    """Values of some nodes of a program."""
    seen: list[Tensor] = []
    Runner(program, dict.fromkeys(nodes, seen.append)).run(inputs)
    return seen


def sqnr(reference: Iterable[Tensor], given: Iterable[Tensor], where: Iterable[Tensor] | None = None) -> float:
    """Signal to quantization noise in dB, over all outputs, or over the elements that `where` selects."""
    pairs = list(zip(reference, given, strict=True))
    masks = list(where) if where is not None else [torch.ones_like(a, dtype=torch.bool) for a, _ in pairs]
    signal = sum(float((a[mask] ** 2).sum()) for (a, _), mask in zip(pairs, masks, strict=True))
    noise = sum(float(((a - b)[mask] ** 2).sum()) for (a, b), mask in zip(pairs, masks, strict=True))
    if noise == 0:
        return float("inf")
    return float(10 * torch.log10(torch.tensor(signal / noise, dtype=torch.float64))) if signal else float("-inf")
