"""Config changes that quantize a node by another technique than the requested one.

Each change is tried on the plan before it is offered, so that all of them help.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from quantc.annotate.annotator import Annotator
from quantc.annotate.config_requests import is_dynamic
from quantc.annotate.quantizer import Backend
from quantc.annotate.reasons import Reason, Reasons, Why
from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule
from quantc.config.resolve import Setting
from quantc.config.selectors import ByNode, ByOp
from quantc.errors import QuantcError
from quantc.inspect.changes import AddConfigRule, Change, RemoveConfigRule
from quantc.ir.decisions import Quantize
from quantc.ir.dialect import op_name
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.spec.formats import PerTensor, PerToken, Role, Timing


class OtherTechniques:
    """Config changes for the nodes of one program."""

    def __init__(self, reasons: Reasons, names: dict[fx.Graph, str]) -> None:
        self.reasons = reasons
        self.program: Program = reasons.program
        self.paths = names

    def asks(self, node: fx.Node) -> bool:
        """True if the config requests dynamic or weight-only quantization for a node."""
        return _is_timed(self.reasons.trials.config.setting(node))

    def for_node(self, node: fx.Node, reason: Reason) -> Iterator[Change[Any]]:
        """Config rules for the node or its inputs; if none helps, the rules to remove."""
        config, found = self.program.plan.config or QuantConfig(), False
        for rule in self._candidates(node, reason):
            change = AddConfigRule(self._name(node), rule)
            if self._takes(change.apply(config), node, rule.is_weight_only):
                found = True
                yield change
        if not found:
            yield from self._take_back(node, config)

    def _candidates(self, node: fx.Node, reason: Reason) -> Iterator[ConfigRule]:
        """Run-time scales in a way the op can have them; static ones; then its weight alone."""
        here = ByNode(node=self._name(node))
        if reason.why is Why.NOT_DYNAMIC:
            for use in self._run_time(node):
                yield ConfigRule(select=here, use=use)
                if not isinstance(use.spec.granularity, PerToken):
                    yield ConfigRule(select=ByOp(op=op_name(node)), use=use)
        for backend in (trial.backend for trial in self.reasons.trials.tables[:1]):
            for own in _static_uses(backend)[:1]:
                for other in (node, *self._dynamic_before(node)):
                    yield ConfigRule(select=ByNode(node=self._name(other)), use=own)
                if reason.why is Why.NOT_NAMED:
                    yield ConfigRule(select=ByOp(op=op_name(node)), use=own)
            if Timing.WEIGHT_ONLY in backend.modes and any(value.op == "get_attr" for value in node.all_input_nodes):
                yield ConfigRule(select=here, use=Quantize(backend.modes[Timing.WEIGHT_ONLY]))

    def _run_time(self, node: fx.Node) -> Iterator[Quantize]:
        """The config's request, and the same per tensor."""
        setting = self.reasons.trials.config.setting(node)
        if setting is None or not isinstance(setting.use, Quantize):
            return
        yield setting.use
        if isinstance(setting.use.spec.granularity, PerToken):
            yield Quantize(setting.use.spec.but(granularity=PerTensor()))

    def _dynamic_before(self, node: fx.Node) -> list[fx.Node]:
        """The dynamic ops whose results a node reads: they yield float."""
        claims = self.program.plan.claims
        found = {value: claims.get(value) for value in node.all_input_nodes}
        return [value for value, claim in found.items() if claim is not None and claim.timing is Timing.DYNAMIC]

    def _take_back(self, node: fx.Node, config: QuantConfig) -> Iterator[Change[Any]]:
        removed: list[ConfigRule] = []
        while (setting := config.resolve(self.program).setting(node)) is not None and _is_timed(setting):
            removed.append(setting.rule)
            config = QuantConfig(rules=tuple(rule for rule in config.rules if rule != setting.rule))
        if removed and self._takes(config, node):
            yield RemoveConfigRule(self._name(node), tuple(removed))

    def _takes(self, config: QuantConfig, node: fx.Node, weights_will_do: bool = False) -> bool:
        """True if with this config a rule lets a node compute on integers, or at least stores its weight."""
        quantizer = self.program.plan.quantizer
        if quantizer is None:
            return False
        trial = replace(self.program, plan=Plan(quantizer, config))
        try:
            quantizer.annotate(Annotator(trial, config.resolve(trial)))
        except QuantcError:  # the backend cannot run it, or another rule of the config comes to nothing
            return False
        claim = trial.plan.claims.get(node)
        return claim is not None and (weights_will_do or claim.timing is not Timing.WEIGHT_ONLY)

    def _name(self, node: fx.Node) -> str:
        path = self.paths[node.graph]
        return f"{path}/{node.name}" if path else node.name


def _static_uses(backend: Backend) -> list[Quantize]:
    """A backend's default quantization of activations."""
    uses = (backend.outcome(role) for role in backend.roles)
    return [use for use in uses if isinstance(use, Quantize) and use.spec.role is Role.ACT]


def _is_timed(setting: Setting | None) -> bool:
    return setting is not None and (is_dynamic(setting) or setting.rule.is_weight_only)
