"""What a config could say so that a node is quantized by another technique than the one it asks for now.

Each change is tried on the plan before it is offered, so that none is told which does not help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from quantc.annotator import Annotator
from quantc.config import ConfigRule, QuantConfig
from quantc.dialect import op_name
from quantc.errors import QuantcError
from quantc.formats import Dynamic, Role, Timing
from quantc.inspect.changes import AddConfigRule, Change, RemoveConfigRule
from quantc.inspect.reasons import Reason, Reasons, Why
from quantc.outcomes import Quantize
from quantc.plan import Plan
from quantc.program import Program
from quantc.requests import is_dynamic
from quantc.resolve import Setting
from quantc.selectors import ByNode, ByOp


class OtherTechniques:
    """Config changes for the nodes of one program."""

    def __init__(self, reasons: Reasons, names: dict[fx.Graph, str]) -> None:
        self.reasons = reasons
        self.program: Program = reasons.program
        self.paths = names

    def asks(self, node: fx.Node) -> bool:
        """Whether the config asks for run-time scales, or for weights alone, at a node."""
        return _is_timed(self.reasons.trials.config.setting(node))

    def for_node(self, node: fx.Node, reason: Reason) -> Iterator[Change[Any]]:
        """What to say of the node or of what feeds it; if that does not help, which rules to take back."""
        config, found = self.program.plan.config or QuantConfig(), False
        for rule in self._candidates(node, reason):
            change = AddConfigRule(self._name(node), rule)
            if self._takes(change.apply(config), node):
                found = True
                yield change
        if not found:
            yield from self._taken_back(node, config)

    def _candidates(self, node: fx.Node, reason: Reason) -> Iterator[ConfigRule]:
        setting = self.reasons.trials.config.setting(node)
        is_named = reason.refusal is not None and reason.refusal.rule.dynamic is Dynamic.NAMED
        if reason.why is Why.NOT_DYNAMIC and is_named and setting is not None:
            yield ConfigRule(select=ByNode(node=self._name(node)), use=setting.use)
            yield ConfigRule(select=ByOp(op=op_name(node)), use=setting.use)
        own = self._static_spec()
        if own is not None:
            for other in (node, *self._dynamic_before(node)):
                yield ConfigRule(select=ByNode(node=self._name(other)), use=own)

    def _static_spec(self) -> Quantize | None:
        """How the backend that has the first choice quantizes activations, unless told otherwise."""
        backends = [trial.backend for trial in self.reasons.trials.tables[:1]]
        uses = [backend.outcome(role) for backend in backends for role in backend.roles]
        return next((use for use in uses if isinstance(use, Quantize) and use.spec.role is Role.ACT), None)

    def _dynamic_before(self, node: fx.Node) -> list[fx.Node]:
        """The dynamic ops whose results a node reads: they yield float."""
        claims = self.program.plan.claims
        found = {value: claims.get(value) for value in node.all_input_nodes}
        return [value for value, claim in found.items() if claim is not None and claim.timing is Timing.DYNAMIC]

    def _taken_back(self, node: fx.Node, config: QuantConfig) -> Iterator[Change[Any]]:
        removed: list[ConfigRule] = []
        while (setting := config.resolve(self.program).setting(node)) is not None and _is_timed(setting):
            removed.append(setting.rule)
            config = QuantConfig(rules=tuple(rule for rule in config.rules if rule != setting.rule))
        if removed and self._takes(config, node):
            yield RemoveConfigRule(self._name(node), tuple(removed))

    def _takes(self, config: QuantConfig, node: fx.Node) -> bool:
        """Whether a rule lets a node compute on integers if the config is this one."""
        quantizer = self.program.plan.quantizer
        if quantizer is None:
            return False
        trial = replace(self.program, plan=Plan(quantizer, config))
        try:
            quantizer.annotate(Annotator(trial, config.resolve(trial)))
        except QuantcError:  # the backend cannot run it, or another rule of the config comes to nothing
            return False
        claim = trial.plan.claims.get(node)
        return claim is not None and claim.timing is not Timing.WEIGHT_ONLY

    def _name(self, node: fx.Node) -> str:
        path = self.paths[node.graph]
        return f"{path}/{node.name}" if path else node.name


def _is_timed(setting: Setting | None) -> bool:
    return setting is not None and (is_dynamic(setting) or setting.rule.is_weight_only)
