"""Reasons why an op was left float: the best one for each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch
from torch import fx
from torch._ops import HigherOrderOperator

from quantc.annotate.config_requests import is_dynamic, only_where_named, why_not_dynamic
from quantc.annotate.rule_trials import Trial, Trials
from quantc.config.config import QuantConfig
from quantc.config.resolve import Setting
from quantc.ir.decisions import Float
from quantc.ir.dialect import is_opaque, op_name
from quantc.ir.program import Program
from quantc.ir.types import TensorType, TupleType, ValueType, dtype_of, type_of
from quantc.patterns.refusals import UnknownType
from quantc.patterns.rule import Match, Refusal
from quantc.spec.formats import Offer, Timing


class Why(StrEnum):
    """The kind of reason."""

    CONFIG = "config"
    """The user's config says so."""
    NOT_FED = "not-fed"
    """Its rule propagates quantization, and its input is float."""
    OPAQUE = "opaque"
    """Without a canonical form, so no rule can name it."""
    INTEGER = "integer"
    """Computes on integers or booleans."""
    NO_RULE = "no-rule"
    """The backend has no rule for the op."""
    REFUSED = "refused"
    """A rule for the op does not fit here."""
    NOT_DYNAMIC = "not-dynamic"
    """A rule for the op fits, but not with dynamic quantization, which the config requests."""
    NOT_NAMED = "not-named"
    """A rule for the op fits, but applies only to ops that the config names."""
    SAID = "said"
    """The quantizer gave a reason of its own."""
    NOT_INTEGER = "not-integer"
    """Quantized, but without an integer form here."""
    NOT_RECORDED = "not-recorded"
    """The quantizer is unavailable, or gave no reason."""


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a node is float."""

    why: Why
    text: str
    refusal: Refusal | None = None
    follower: Match | None = None
    trial: Trial | None = None


class Reasons:
    """The reasons of one program. The tables are matched lazily, once for all nodes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.trials = Trials(program)

    def __call__(self, node: fx.Node) -> Reason:
        """The reason why a node without a claim is float."""
        for find in (self._config, self._follower, self._said, self._run_time, self._unnamed, self._kind):
            found = find(node)
            if found is not None:
                return found
        return self._refused(node)

    def setting(self, node: fx.Node) -> Setting | None:
        """The setting of the config that keeps a node float."""
        found = self.trials.config.setting(node)
        return found if found is not None and isinstance(found.use, Float) else None

    def _config(self, node: fx.Node) -> Reason | None:
        if node in self.trials.left_out:
            return Reason(Why.CONFIG, self.trials.left_out[node])
        setting = self.setting(node)
        if setting is None or not any(trial.follower(node) for trial in self.trials.tables):
            return None
        return Reason(Why.CONFIG, setting.why_float)

    def _follower(self, node: fx.Node) -> Reason | None:
        for trial in self.trials.tables:
            match = trial.follower(node)
            if match is not None:
                said = self._left_float.get(match.root) or f"{match.rule.name}: its input is not quantized"
                return Reason(Why.NOT_FED, said, follower=match, trial=trial)
        return None

    def _said(self, node: fx.Node) -> Reason | None:
        said = self._left_float.get(node)
        return None if said is None else Reason(Why.SAID, said)

    def _run_time(self, node: fx.Node) -> Reason | None:
        found = self._not_dynamic.get(node)
        if found is None:
            return None
        refusal, trial = found
        if trial.fits_unnamed(node, Timing.DYNAMIC):
            return None
        text = f"{op_name(node)} on {trial.backend.name}: {refusal.reason}"
        if refusal.rule.dynamic is Offer.NO:
            text = f"{op_name(node)} has no dynamic form on {trial.backend.name}, which the config asks for"
        return Reason(Why.NOT_DYNAMIC, text, refusal=refusal, trial=trial)

    def _unnamed(self, node: fx.Node) -> Reason | None:
        """For a matmul of two activations, or attention made of these: the config would have to name it."""
        whole = self._left_whole.get(node)
        if whole is not None:
            return Reason(Why.NOT_NAMED, f"{op_name(node)} is left whole: its products are float: {whole}")
        found = self._not_named.get(node)
        if found is None or dtype_of(node) is not torch.float32:  # naming would not help unless it is float32
            return None
        refusal, trial = found
        if trial.fits_unnamed(node, Timing.STATIC):
            return None
        asking = f'config.set_op("{op_name(node)}", spec) asks for it'
        text = f"{op_name(node)} on {trial.backend.name}: {refusal.reason}; {asking}"
        return Reason(Why.NOT_NAMED, text, refusal=refusal, trial=trial)

    @cached_property
    def _left_whole(self) -> dict[fx.Node, str]:
        """Nodes that the backend's transforms left whole: attention whose matmuls the config does not name."""
        config = self.program.plan.config or QuantConfig()
        whole: dict[fx.Node, str] = {}
        for member in self.trials.members:
            for step in member.transforms():
                whole |= step.for_config(config).left_whole(self.program)
        return whole

    @cached_property
    def _not_named(self) -> dict[fx.Node, tuple[Refusal, Trial]]:
        """The rules that would take a node statically if the config named it."""
        found: dict[fx.Node, tuple[Refusal, Trial]] = {}
        for trial in self.trials.tables:
            rules = [rule.name for rule in trial.table if rule.static is Offer.NAMED]
            for refusal in trial.matches.refusals(rules):
                if refusal.reason == only_where_named(Timing.STATIC):
                    found.setdefault(refusal.node, (refusal, trial))
        return found

    @cached_property
    def _not_dynamic(self) -> dict[fx.Node, tuple[Refusal, Trial]]:
        """The rules that would take a node if the config did not request dynamic quantization."""
        config = self.trials.config
        asked: dict[fx.Node, list[Setting]] = {node: [*roles.values()] for node, roles in config.nodes.items()}
        for (_, consumer), setting in config.edges.items():
            asked.setdefault(consumer, []).append(setting)
        asked = {node: found for node, found in asked.items() if any(map(is_dynamic, found))}
        found: dict[fx.Node, tuple[Refusal, Trial]] = {}
        for trial in self.trials.tables if asked else ():
            for refusal in trial.matches.refusals():
                if refusal.reason in _said_of_run_time(refusal, asked.get(refusal.node, [])):
                    found.setdefault(refusal.node, (refusal, trial))
        return found

    @cached_property
    def _left_float(self) -> dict[fx.Node, str]:
        return self.program.plan.left_float.rows

    def _kind(self, node: fx.Node) -> Reason | None:
        """A reason from the node itself, independent of the rules."""
        if is_opaque(node):
            return Reason(Why.OPAQUE, f"{op_name(node)} has no canonical form, so no rule can name it")
        if isinstance(node.target, HigherOrderOperator):
            return Reason(Why.OPAQUE, f"{op_name(node)} calls other graphs, and those are what rules look at")
        if not _has_floats(type_of(node)):
            return Reason(Why.INTEGER, f"it yields {type_of(node)}, and only floats are quantized")
        return None

    def _refused(self, node: fx.Node) -> Reason:
        for trial in self.trials.tables:
            refusal = trial.refusal(node)
            if refusal is not None:
                text = f"{refusal.rule.name} of {trial.backend.name}: {refusal.reason}"
                why = Why.INTEGER if _is_about_integers(refusal) else Why.REFUSED
                return Reason(why, text, refusal=refusal, trial=trial)
        if not self.trials.members:
            return Reason(Why.NOT_RECORDED, "the reason is not recorded, and the quantizer is not at hand")
        if op_name(node) in self.trials.operators:
            return Reason(Why.NOT_RECORDED, f"{self.trials.names} knows {op_name(node)}, and left this one out")
        return Reason(Why.NO_RULE, f"{self.trials.names} has no rule for {op_name(node)}")


def _said_of_run_time(refusal: Refusal, asked: list[Setting]) -> set[str | None]:
    """The objections to dynamic quantization by a rule that was refused."""
    node, rule = refusal.node, refusal.rule
    return {why_not_dynamic(rule, setting, node, value) for setting in asked for value in node.all_input_nodes}


def _is_about_integers(refusal: Refusal) -> bool:
    cause = refusal.cause
    found = getattr(cause, "found", None)
    return not isinstance(cause, UnknownType) and isinstance(found, TensorType) and not found.dtype.is_floating_point


def _has_floats(kind: ValueType | None) -> bool:
    """True if a type contains a float tensor; an unknown type may."""
    if kind is None:
        return True
    if isinstance(kind, TupleType):
        return any(_has_floats(item) for item in kind.items)
    return isinstance(kind, TensorType) and kind.dtype.is_floating_point
