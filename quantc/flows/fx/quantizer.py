"""The quantizer of the FX flow: a rule table says what can be quantized, a QConfigMapping what is and how."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from quantc.annotate.annotator import Annotator
from quantc.annotate.match_operands import Slot
from quantc.annotate.quantizer import Backend
from quantc.annotate.table_annotation import TableAnnotation
from quantc.config.config_rule import ConfigRule
from quantc.config.resolve import Resolution, Setting
from quantc.config.selectors import ByNode
from quantc.errors import SpecError
from quantc.flows.foreign_observers import inner, spec_of
from quantc.flows.fx.assign_qconfigs import MAX_KNOWN, Choice, is_fixed, quant_type_of, reuses_input, rounds
from quantc.flows.fx.custom_config import PrepareCustomConfig, QuantType
from quantc.flows.fx.formats import why_not_format
from quantc.flows.fx.native_rules import NATIVE, FlowBackend
from quantc.flows.fx.qconfig_mapping import QConfigMapping
from quantc.ir.decisions import Fixed, Float, Quantize, SameAs, TensorOutcome
from quantc.ir.plan import Claim
from quantc.ir.program import Program, attribute
from quantc.ir.sites import Site
from quantc.spec.formats import Role, Timing
from quantc.spec.spec import FP16_WEIGHT, INT4_WEIGHT, INT8_WEIGHT_ONLY, QuantSpec

if TYPE_CHECKING:
    from quantc.patterns.explain_match import Explanation
    from quantc.patterns.rule import Match
    from quantc.pipeline.pipeline import Pass

NOTHING = Float("the QConfigMapping has nothing for it")
CUSTOM = "custom-module"
"""The rule that claims modules which are swapped."""


@dataclass(frozen=True, eq=False)
class QConfigQuantizer:
    """Quantizes what has a QConfig, as far as a backend has rules for it."""

    mapping: QConfigMapping
    custom: PrepareCustomConfig = field(default_factory=PrepareCustomConfig)
    backend: Backend = NATIVE

    @property
    def name(self) -> str:
        return self.backend.name

    def transforms(self) -> tuple[Pass, ...]:
        return self.backend.before

    def finishing(self) -> tuple[Pass, ...]:
        return self.backend.after

    def annotate(self, annotator: Annotator) -> None:
        choice = Choice(annotator.program, self.mapping)
        own = Annotator(annotator.program, _resolution(choice), annotator.plan)
        QConfigAnnotation(self.backend, own, choice, self.custom).run()

    def validate(self, program: Program) -> None:
        """Specs come from QConfigs, and those that the backend cannot run were refused one by one."""

    def supported_operators(self) -> tuple[str, ...]:
        from quantc.annotate.quantizer import TableQuantizer

        return TableQuantizer(self.backend).supported_operators()

    def explain(self, program: Program, node: str) -> Explanation:
        from quantc.ir.plan import Plan

        choice = Choice(program, self.mapping)
        annotator = Annotator(program, _resolution(choice), Plan())
        admission = QConfigAnnotation(self.backend, annotator, choice, self.custom).admission
        return self.backend.table.explain(program, node, admission)


@lru_cache(MAX_KNOWN)
def activation_spec(qconfig: Any) -> QuantSpec:
    """The spec of an op's activations.

    An observer with `reduce_range` computes its scale for a narrower range than its dtype's, but does not clamp to it: the
    tensor keeps the range of the dtype, as in torch. A fake quantizer clamps in training, so its range is kept.
    """
    observer = qconfig.activation()
    found = spec_of(inner(observer))
    return found if rounds(observer) else found.but(qmin=found.dtype.qmin, qmax=found.dtype.qmax)


@lru_cache(MAX_KNOWN)
def quantizes_weights(qconfig: Any) -> bool:
    """True if a QConfig quantizes weights."""
    try:
        weight_spec(qconfig)
    except SpecError:
        return False
    return True


@lru_cache(MAX_KNOWN)
def weight_spec(qconfig: Any) -> QuantSpec:
    """The spec of an op's weight."""
    observer = inner(qconfig.weight())
    dtype = getattr(observer, "dtype", None)
    if dtype == torch.float16:
        return FP16_WEIGHT
    if quant_type_of(qconfig) is not QuantType.WEIGHT_ONLY:
        return spec_of(observer, Role.WEIGHT)
    # bytes without a sign, shifted by half their range: the same numbers
    base = INT4_WEIGHT.but(timing=Timing.WEIGHT_ONLY) if dtype == torch.quint4x2 else INT8_WEIGHT_ONLY
    found = spec_of(observer, Role.WEIGHT)
    return base.but(scheme=found.scheme, granularity=found.granularity)


def _resolution(choice: Choice) -> Resolution:
    """The QConfigs of all nodes as the engine's settings."""
    found: dict[fx.Node, dict[Role, Setting]] = {}
    known: dict[int, dict[Role, QuantSpec | Float]] = {}
    for node, qconfig in choice.qconfigs.items():
        if id(qconfig) not in known:
            known[id(qconfig)] = _uses(qconfig)
        found[node] = {
            role: Setting(use if isinstance(use, Float) else Quantize(use), _as_rule(node, use))
            for role, use in known[id(qconfig)].items()
        }
    return Resolution(found)


def _as_rule(node: fx.Node, use: QuantSpec | Float) -> ConfigRule:
    return ConfigRule.model_validate({"select": ByNode(node=node.name), "use": use})


def _uses(qconfig: Any) -> dict[Role, QuantSpec | Float]:
    """A spec for each role; FLOAT for all of them where nothing is to be quantized."""
    kind = None if qconfig is None else quant_type_of(qconfig)
    if qconfig is not None and reuses_input(qconfig):
        return {}
    if kind is None:
        return dict.fromkeys(Role, NOTHING)
    weight: dict[Role, QuantSpec | Float] = {}
    if quantizes_weights(qconfig):
        weight = {Role.WEIGHT: weight_spec(qconfig)}
    if kind is QuantType.WEIGHT_ONLY or weight.get(Role.WEIGHT) == FP16_WEIGHT:
        return {Role.ACT: Float("weight only"), Role.BIAS: NOTHING, **weight}
    return {Role.ACT: activation_spec(qconfig), **weight}


class QConfigAnnotation(TableAnnotation):
    """One run of a table over a program, where each op has a QConfig.

    A tensor that an op yields quantized is read so by all that take its format, whatever their own QConfigs say.
    """

    def __init__(self, backend: Backend, annotator: Annotator, choice: Choice, custom: PrepareCustomConfig) -> None:
        super().__init__(backend, annotator)
        self.choice = choice
        self.custom = custom
        self.said = backend if isinstance(backend, FlowBackend) else NATIVE
        """The backend's facts about its rules: spellings, kinds, formats and known ranges."""
        self.reasons: dict[fx.Node, str] = {}
        """The reason why no rule took a node whose pattern matched."""
        self.others: dict[fx.Node, str] = {}
        """The same from rules about other layers or functions: used if there is no better reason."""

    def run(self) -> None:
        super().run()
        plan = self.annotator.plan
        for node in self.annotator.program.graph.nodes:
            if node.op == "call_module":
                self._custom_module(node)
            reason = self.reasons.get(node, self.others.get(node))
            if reason is not None and node not in plan.claims and node not in plan.left_float:
                self.annotator.leave(node, reason)

    # -- what may be matched -----------------------------------------------------------------------------------

    def _why_not(self, match: Match) -> str | None:
        spelled = self.said.spelled.get(match.rule.name)
        other = None if spelled is None else spelled(match)
        if other is not None:
            self.others.setdefault(first_of(match), other)
            return other
        reason = self._why_not_kind(match) or super()._why_not(match)
        if reason is not None:
            self.reasons.setdefault(first_of(match), f"{match.rule.name}: {reason}")
        return reason

    def _why_not_kind(self, match: Match) -> str | None:
        qconfig = self.choice[first_of(match)]
        if qconfig is None:
            return "it has no QConfig"
        is_weighted = any(role.startswith("weight") for role in match.rule.roles.values())
        if reuses_input(qconfig):
            return "its QConfig hands the scale of activations on, and says nothing of weights" if is_weighted else None
        kind, rule, said = quant_type_of(qconfig), match.rule.name, self.said
        allowed = said.kinds.get(rule, (QuantType.STATIC,))
        if kind not in allowed:
            return f"{rule} is quantized {' or '.join(allowed)}, and its QConfig is {kind or 'float'}"
        if is_weighted and not quantizes_weights(qconfig):
            return "its QConfig leaves weights float, and there is no kernel for that"
        reason = why_not_format(said.formats.get(rule, ()), qconfig, kind, is_weighted)
        if reason is None and rule in said.known_ranges and not is_fixed(qconfig):
            return f"the range of {rule} is known, so its QConfig must have a FixedQParamsObserver for activations"
        return reason

    # -- what operands and results become ------------------------------------------------------------------------

    def _chosen(self, slot: Slot, setting: Setting | None, sites: dict[str, Site]) -> TensorOutcome | None:
        own = self._own(slot.role)
        if own is not None and own.spec.role is not Role.ACT:
            return super()._chosen(slot, setting, sites)
        qconfig = self.choice[slot.node]
        given = self._outcome_of(slot.value)
        if reuses_input(qconfig):
            return None if given is None else SameAs(self.annotator.places.out(slot.value))
        if is_fixed(qconfig):
            setting = self._of_others(setting)
        if setting is None and given is None:
            return None  # nothing says how it is quantized
        wanted = super()._chosen(slot, setting, sites)
        if given is None or not isinstance(wanted, Quantize) or wanted == given:
            return wanted
        same_format = given.spec.dtype is wanted.spec.dtype and wanted.spec.timing is Timing.STATIC
        return SameAs(self.annotator.places.out(slot.value)) if same_format else wanted

    def _of_others(self, setting: Setting | None) -> Setting | None:
        """A range that is known beforehand is that of a result: what such an op reads is quantized like all else."""
        common = self.choice.mapping.global_qconfig
        if setting is None or common is None or quant_type_of(common) is not QuantType.STATIC or is_fixed(common):
            return None
        return replace(setting, use=Quantize(activation_spec(common)))

    def _yielding(self, match: Match, readers: list[fx.Node]) -> Setting | None:
        """An op that is fused into another goes with it: the QConfig is that of the first."""
        return self.config.setting(first_of(match))

    def _outcome_of(self, value: fx.Node) -> Quantize | Fixed | None:
        outcome = self._root(self.annotator.plan.outcomes.get(self.annotator.places.out(value)))
        return outcome if isinstance(outcome, Quantize | Fixed) else None

    def _of_role(
        self, role: str, setting: Setting | None, node: fx.Node, value: fx.Node | None = None
    ) -> TensorOutcome | None:
        own = self._own(role)
        if isinstance(own, Fixed) and setting is not None and isinstance(setting.use, Quantize):
            qconfig = self.choice[node]
            return _fixed_scale(qconfig, setting.use.spec) if is_fixed(qconfig) else own
        return super()._of_role(role, setting, node, value)

    def _share_lists(self, match: Match, sites: dict[str, Site]) -> None:
        """The members of a list that something else is like have one scale: that of the first which data decides."""
        outcomes, places = self.annotator.plan.outcomes, self.annotator.places
        for name in sites:
            if not self._shares(match, name):
                continue
            own = [places.use(slot.node, slot.operand) for slot in self._slots(match, name)]
            members = [site for site in own if site in outcomes and not isinstance(outcomes[site], Float)]
            leader = next((site for site in members if isinstance(self._root(outcomes[site]), Quantize)), None)
            for site in members if leader is not None else ():
                if site != leader and leader is not None:
                    outcomes[site] = SameAs(leader)

    @staticmethod
    def _slots(match: Match, name: str) -> list[Slot]:
        from quantc.annotate.match_operands import slots_of

        return [slot for slot in slots_of(match) if slot.name == name]

    # -- modules that are swapped ----------------------------------------------------------------------------------

    def _custom_module(self, node: fx.Node) -> None:
        """A module with an observed version reads and yields quantized tensors, if its QConfig is static."""
        program, qconfig = self.annotator.program, self.choice[node]
        kind = None if qconfig is None else quant_type_of(qconfig)
        module = attribute(program.owner(node.graph), str(node.target))
        if kind is not QuantType.STATIC or not is_swapped(module, self.custom, QuantType.STATIC):
            return
        outcome = Quantize(activation_spec(qconfig))
        for index, value in enumerate(self.annotator.places.operands(node)):
            if self.annotator.why_not_tensor(value) is None:
                given = self._outcome_of(value)
                is_given = given is not None and given.spec.dtype is outcome.spec.dtype
                self.annotator.operand(node, index, SameAs(self.annotator.places.out(value)) if is_given else outcome)
        if self.annotator.why_not_tensor(node) is None:
            self.annotator.output(node, outcome)
        self.annotator.claim([node], Claim(self.backend.name, CUSTOM, node.name))


def first_of(match: Match) -> fx.Node:
    """The node of a match that comes first in the program."""
    return min(match.nodes)


def is_swapped(module: Any, custom: PrepareCustomConfig, kind: QuantType) -> bool:
    """True if a module has an observed version, or is one."""
    swaps = custom.float_to_observed_mapping.get(kind, {})
    return type(module) in swaps or type(module) in swaps.values()


def _fixed_scale(qconfig: Any, spec: QuantSpec) -> Fixed:
    """The fixed qparams of an observer."""
    scale, zero_point = inner(qconfig.activation()).calculate_qparams()
    return Fixed(float(scale), int(zero_point), spec.but(observe=None, eps=None))
