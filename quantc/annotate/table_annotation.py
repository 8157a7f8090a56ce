"""Application of a backend's rule table to a program.

Rules that request quantized tensors go first. Rules with a `pass` operand follow: they apply where their input comes
quantized. A rule that moves values (its result is like its operand) also applies where its operand is available on
demand and the consumers of its result want it quantized: nothing is lost by quantizing before the move instead of after
it. A follower that computes does not request, since its operands would be rounded for its sake alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from quantc.annotate.annotator import Annotator
from quantc.annotate.backend import LIKE, ON_DEMAND, PASS, Backend
from quantc.annotate.config_requests import (
    ConfigRequest,
    RefusedRequest,
    is_dynamic,
    refuse,
    timing_of,
    why_not_dynamic,
    why_not_static,
)
from quantc.annotate.match_operands import Slot, follows, keeps_values, moves, slots_of
from quantc.config.config_rule import Use
from quantc.config.resolve import Setting
from quantc.errors import AnnotationError
from quantc.ir.decisions import Derived, Fixed, Float, Quantize, SameAs, TensorOutcome
from quantc.ir.dialect import op_name
from quantc.ir.plan import Claim, Part
from quantc.ir.site_index import outputs_of
from quantc.ir.sites import Site
from quantc.ir.types import rank_of
from quantc.spec.formats import PerChannel, Role, Timing
from quantc.spec.spec import QuantSpec

if TYPE_CHECKING:
    from quantc.patterns.rule_matcher import Admission, Match


class TableAnnotation:
    """One run of a table over a program."""

    def __init__(self, backend: Backend, annotator: Annotator) -> None:
        from quantc.patterns.rule_matcher import Admission

        self.backend = backend
        self.annotator = annotator
        self.config = annotator.config
        self.admission: Admission = Admission(annotator.left_out, self._why_not)
        self.on_demand: dict[fx.Node, Quantize | Fixed] = {}
        """Tensors that can be quantized on demand."""
        self.refused: list[RefusedRequest] = []
        """Requests of the config that the backend cannot run."""

    def run(self) -> None:
        matches = list(self.backend.table.match(self.annotator.program, self.admission))
        for match in matches:
            if not follows(match):
                self._anchor(match)
        for node, reason in self.annotator.left_out.items():
            if node not in self.annotator.plan.claims:
                self.annotator.leave(node, reason)
        able = self._able([match for match in matches if follows(match)])
        asked = self._asked_for(able)
        for match in able:
            self._follow(match, match.root in asked)
        refuse(self.backend, self.refused)

    # -- what may be matched -----------------------------------------------------------------------------------

    def _why_not(self, match: Match) -> str | None:
        """The reason against a match: only float tensors without in-place writes can be quantized, and weights must be
        constants."""
        reason = self._why_not_lookup(match) or self._why_not_together(match)
        reason = reason or why_not_static(match.rule, ((slot.node, self._setting(slot)) for slot in slots_of(match)))
        if reason is not None:
            return reason
        for slot in slots_of(match):
            setting = self._setting(slot)
            if (setting is not None and isinstance(setting.use, Float)) or self._is_bias(slot):
                continue
            reason = self.annotator.why_not_tensor(slot.value)
            if reason is None and slot.role != PASS:
                reason = why_not_dynamic(match.rule, setting, slot.node, slot.value)
            reason = reason or self._why_not_weight(slot)
            if reason is not None:
                return reason
        if reason := next(filter(None, map(self.annotator.why_not_read, match.nodes)), None):
            return reason
        if "out" in match.rule.roles:
            reasons = (self.annotator.why_not_tensor(output) for output in outputs_of(match.root))
            return next((reason for reason in reasons if reason is not None), None)
        return None

    def _own(self, role: str) -> Quantize | Fixed | None:
        """The backend's quantization for a role; None for a role that refers to other sites."""
        return None if role == PASS or role.startswith(LIKE) else self.backend.outcome(role)

    def _why_not_weight(self, slot: Slot) -> str | None:
        own = self._own(slot.role)
        if own is None or own.spec.role is not Role.WEIGHT:
            return None
        if slot.value.op != "get_attr":
            return f"{slot.value.name} is computed, and {slot.name} must be a constant to be quantized as a weight"
        granularity, rank = own.spec.granularity, rank_of(slot.value)
        if isinstance(granularity, PerChannel) and rank is not None and not -rank <= granularity.axis < rank:
            return f"{slot.value.name} has {rank} axes, and its channels are to lie on axis {granularity.axis}"
        return None

    def _why_not_lookup(self, match: Match) -> str | None:
        """Ops that read only weights have no dynamic form: refuse where the config requests it, without a setting for
        weights."""
        if not is_dynamic(self.config.setting(match.root)) or self.config.setting(match.root, Role.WEIGHT) is not None:
            return None
        own = [self._own(role) for role in match.rule.roles.values()]
        if any(outcome is None or outcome.spec.role is not Role.WEIGHT for outcome in own):
            return None
        return "it reads no activation, so it has no dynamic form; INT8_WEIGHT_ONLY would store its table in bytes"

    def _why_not_together(self, match: Match) -> str | None:
        """Do not fuse an op that the config makes weight-only with one that computes on integers."""
        if not self.config.nodes or len(match.nodes) < 2:
            return None
        settings = {slot: self._setting(slot) for slot in slots_of(match)}
        alone = next((slot for slot, said in settings.items() if timing_of(said) is Timing.WEIGHT_ONLY), None)
        for slot, said in settings.items():
            own = self._own(slot.role)
            is_read = own is not None and own.spec.role is Role.ACT and not (said and isinstance(said.use, Float))
            if alone is not None and is_read:
                return f"{alone.node.name} is weight-only, as the config says, and {slot.value.name} would be quantized"
        return None

    def _is_bias(self, slot: Slot) -> bool:
        """True for a bias of a recurrent op, which takes weights and biases in one list: those of rank 1 stay float."""
        own = self._own(slot.role)
        return own is not None and own.spec.role is Role.WEIGHT and rank_of(slot.value) == 1

    # -- rules that compute ------------------------------------------------------------------------------------

    def _anchor(self, match: Match) -> None:
        sites: dict[str, Site] = {}
        readers: dict[fx.Node, list[QuantSpec]] = {}
        for slot in slots_of(match):
            if self._is_bias(slot):
                continue
            outcome = self._like(slot.role, sites) or self._chosen(slot, self._setting(slot), sites)
            if outcome is None:
                continue
            site = self.annotator.operand(slot.node, slot.operand, outcome)
            sites.setdefault(slot.name, site)
            root = self._root(outcome)
            if isinstance(root, Quantize | Fixed):
                readers.setdefault(slot.node, []).append(root.spec)
        self._share_lists(match, sites)
        read = [spec for specs in readers.values() for spec in specs]
        timing = _timing(read)
        # results of dynamic and weight-only ops are float
        is_static = all(spec.timing is Timing.STATIC for spec in read)
        yields = is_static and self._output(match, sites, self._yielding(match, list(readers)))
        if yields or (readers and timing is Timing.STATIC):
            self._claim(match, Part.QUANTIZED, timing)
        elif readers:
            self._claim_readers(match, list(readers), timing)
        else:
            self._leave_unread(match)

    def _claim_readers(self, match: Match, readers: list[fx.Node], timing: Timing) -> None:
        """Claim only the nodes that read a quantized tensor: their result is float, and so is what follows."""
        last = readers[-1]
        nodes = dict.fromkeys([*readers, *outputs_of(last)])
        self.annotator.claim(nodes, Claim(self.backend.name, match.rule.name, last.name, timing=timing))
        for node in match.nodes:
            if node not in nodes:
                self.annotator.leave(node, f"{last.name} before it is {timing.value} and yields float")

    def _leave_unread(self, match: Match) -> None:
        """Leave a match float, all of whose inputs and outputs the config leaves float."""
        settings = (self._setting(slot) for slot in slots_of(match))
        setting = next((found for found in settings if found is not None), None)
        reason = f"the config leaves all it reads float: {setting.rule}" if setting else "nothing it reads is quantized"
        if setting is not None and setting.rule.is_weight_only:
            reason = setting.why_float
        for node in match.nodes:
            self.annotator.leave(node, f"{match.rule.name}: {reason}")

    def _shares(self, match: Match, name: str) -> bool:
        return f"{LIKE}{name}" in match.rule.roles.values()

    def _share_lists(self, match: Match, sites: dict[str, Site]) -> None:
        """Tie the members of a list that another operand or the result is like to one scale."""
        outcomes = self.annotator.plan.outcomes
        for name, first in sites.items():
            if not self._shares(match, name) or isinstance(outcomes[first], Float):
                continue
            for slot in slots_of(match):
                site = self.annotator.places.use(slot.node, slot.operand)
                if slot.name != name or site == first or isinstance(outcomes[site], Float):
                    continue
                if outcomes[site] != outcomes[first]:
                    raise _conflict(match, {first: outcomes[first], site: outcomes[site]})
                outcomes[site] = SameAs(first)

    def _yielding(self, match: Match, readers: list[fx.Node]) -> Setting | None:
        """The setting for the result. An op fused into another follows it: if the config assigns it another technique,
        which has no meaning for it, the setting of the op that reads applies."""
        setting = self.config.setting(match.root)
        fused = bool(readers) and match.root not in readers and timing_of(setting) is not Timing.STATIC
        return self.config.setting(readers[-1]) if fused else setting

    def _output(self, match: Match, sites: dict[str, Site], setting: Setting | None) -> bool:
        """Decide the output of a match; True if it is quantized, or available on demand."""
        role = match.rule.roles.get("out")
        if role is None or (setting is not None and _yields_float(setting.use)):
            return False
        outcome = self._like(role, sites) or self._of_role(role, setting, match.root)
        if outcome is None:
            return False
        for output in outputs_of(match.root):
            if role.endswith(ON_DEMAND) and isinstance(outcome, Quantize | Fixed):
                self.on_demand[output] = outcome
            else:
                self.annotator.output(output, outcome)
        return True

    def _like(self, role: str, sites: dict[str, Site]) -> TensorOutcome | None:
        site = sites.get(role.removeprefix(LIKE)) if role.startswith(LIKE) else None
        if site is None or isinstance(self.annotator.plan.outcomes[site], Float):
            return None
        return SameAs(site)

    def _setting(self, slot: Slot) -> Setting | None:
        """The setting for an operand: that of the edge, or of its role at this node."""
        edge = self.config.edges.get((slot.value, slot.node))
        if edge is not None:
            return edge
        own = self._own(slot.role)
        setting = self.config.setting(slot.node, Role.ACT if own is None else own.spec.role)
        if self.config.edges and timing_of(setting) is Timing.WEIGHT_ONLY and self._is_given_integers(slot.node):
            return None  # the edge makes the op compute on integers, so its weight gets the backend's spec
        return setting

    def _is_given_integers(self, node: fx.Node) -> bool:
        """True if the config names an edge into a node on which the tensor is quantized."""
        edges = (self.config.edges.get((value, node)) for value in node.all_input_nodes)
        return any(edge is not None and not isinstance(edge.use, Float) for edge in edges)

    def _chosen(self, slot: Slot, setting: Setting | None, sites: dict[str, Site]) -> TensorOutcome | None:
        """The decision about an operand."""
        own = self._own(slot.role)
        if own is not None and own.spec.role is Role.BIAS:
            parents = [sites[parent] for parent in sites if parent != slot.name]
            is_known = all(self._is_static(parent) for parent in parents)
            return Derived(tuple(parents)) if len(parents) > 1 and is_known else None
        return self._of_role(slot.role, setting, slot.node, slot.value)

    def _is_static(self, site: Site) -> bool:
        """True if the qparams at a site are known before the program runs, and the op computes on integers."""
        root = self._root(self.annotator.plan.outcomes[site])
        return isinstance(root, Fixed) or (isinstance(root, Quantize) and root.spec.timing is Timing.STATIC)

    def _of_role(
        self, role: str, setting: Setting | None, node: fx.Node, value: fx.Node | None = None
    ) -> TensorOutcome | None:
        """The backend's quantization for a role, unless the config overrides it."""
        own = self._own(role)
        if own is None or setting is None:
            return own
        if isinstance(setting.use, Float):
            return Float(f"{setting.use.reason} (rule {setting.rule})")
        request = ConfigRequest(self.backend, node, value, setting)
        return request.granted(own, setting.use, self.annotator.program, self.refused)

    def _claim(self, match: Match, part: Part, timing: Timing = Timing.STATIC) -> None:
        nodes = dict.fromkeys([*match.nodes, *outputs_of(match.root)])
        self.annotator.claim(nodes, Claim(self.backend.name, match.rule.name, match.root.name, part, timing))

    # -- rules that follow -------------------------------------------------------------------------------------

    def _able(self, followers: list[Match]) -> list[Match]:
        """The matches whose inputs are all quantized or available on demand; records the reason for the others."""
        able: list[Match] = []
        handed_on: set[fx.Node] = set()
        for match in followers:
            reason = self._why_not_able(match, handed_on)
            if reason is not None:
                self.annotator.leave(match.root, reason)
                continue
            able.append(match)
            if "out" in match.rule.roles:
                handed_on.update(outputs_of(match.root))
        return able

    def _why_not_able(self, match: Match, handed_on: set[fx.Node]) -> str | None:
        setting = self.config.setting(match.root)
        if setting is not None and isinstance(setting.use, Float):
            return setting.why_float
        if is_dynamic(setting) and not keeps_values(match):
            return f"{op_name(match.root)} has no dynamic form on {self.backend.name}"
        for slot in slots_of(match):
            edge = self._setting(slot)
            if edge is not None and isinstance(edge.use, Float):
                return f"{match.rule.name}: its input {slot.value.name} is left float, as the config says: {edge.rule}"
            known = slot.value in self.on_demand or slot.value in handed_on or self._decided(slot.value)
            if slot.role == PASS and not known:
                return self._not_quantized(match, slot.value)
        return None

    def _not_quantized(self, match: Match, value: fx.Node) -> str:
        """The reason for a follower whose input is float."""
        giver = self.annotator.plan.claims.get(value)
        if giver is not None and giver.timing is not Timing.STATIC:
            return (
                f"{match.rule.name}: it hands on what is quantized, and {giver.root} is {giver.timing}: it yields float"
            )
        return f"{match.rule.name}: its input {value.name} is not quantized"

    def _decided(self, value: fx.Node) -> bool:
        """True if all consumers read a tensor quantized."""
        outcome = self.annotator.plan.outcomes.get(self.annotator.places.out(value))
        return outcome is not None and not isinstance(outcome, Float)

    def _asked_for(self, followers: list[Match]) -> set[fx.Node]:
        """The roots of moves with a result that some consumer wants quantized and none wants in float.

        If a consumer reads the result in float, it is better to quantize for the others alone, after the move.
        Followers that compute accept either.
        """
        outcomes, places = self.annotator.plan.outcomes, self.annotator.places
        wanted: set[tuple[fx.Node, int]] = {
            (places.node(site), site.operand)
            for site, outcome in outcomes.items()
            if site.operand is not None and not isinstance(outcome, Float) and not _is_dynamic(outcome)
        }
        asked: set[fx.Node] = set()
        computing = {node for match in followers if not moves(match) for node in match.nodes}
        for match in reversed(followers):
            if not moves(match):
                continue
            reads = [read for output in outputs_of(match.root) for read in places.reads(output)]
            if any(read in wanted for read in reads) and all(read in wanted or read[0] in computing for read in reads):
                asked.add(match.root)
                wanted.update((slot.node, slot.operand) for slot in slots_of(match))
        return asked

    def _follow(self, match: Match, asked: bool) -> None:
        given = {slot: self._given(slot, asked) for slot in slots_of(match) if slot.role == PASS}
        missing = next((slot.value for slot, outcome in given.items() if outcome is None), None)
        if missing is not None:
            return self.annotator.leave(match.root, self._why_not_given(match, missing))
        sites: dict[str, Site] = {}
        for slot in self._in_order(match, given):
            known = sites.get(slot.name)
            if slot.role != PASS:
                outcome = self._like(slot.role, sites) or self._chosen(slot, self._setting(slot), sites)
            else:
                outcome = SameAs(known) if known is not None and self._shares(match, slot.name) else given[slot]
            if outcome is not None:
                sites.setdefault(slot.name, self.annotator.operand(slot.node, slot.operand, outcome))
        self._output(match, sites, self.config.setting(match.root))
        return self._claim(match, Part.PROPAGATED if moves(match) else Part.QUANTIZED)

    def _given(self, slot: Slot, asked: bool) -> TensorOutcome | None:
        """The decision for a `pass` operand; None if it comes as float."""
        if self._decided(slot.value):
            return SameAs(self.annotator.places.out(slot.value))
        return self.on_demand.get(slot.value) if asked else None

    def _why_not_given(self, match: Match, missing: fx.Node) -> str:
        if missing not in self.on_demand or not moves(match):
            return self._not_quantized(match, missing)
        return f"{match.rule.name}: not all that reads its result wants it quantized, so {missing.name} stays float"

    def _in_order(self, match: Match, given: dict[Slot, TensorOutcome | None]) -> list[Slot]:
        """The operands, the one to tie the others to first: preferably not one with fixed qparams."""
        return sorted(slots_of(match), key=lambda slot: not isinstance(self._root(given.get(slot)), Quantize))

    def _root(self, outcome: TensorOutcome | None) -> TensorOutcome | None:
        while isinstance(outcome, SameAs):
            outcome = self.annotator.plan.outcomes[outcome.site]
        return outcome


def _timing(read: list[QuantSpec]) -> Timing:
    """The technique of an op by its inputs; one with float inputs and a quantized result is static."""
    if any(spec.timing is Timing.DYNAMIC for spec in read):
        return Timing.DYNAMIC
    only_weights = bool(read) and all(spec.role is Role.WEIGHT for spec in read)
    return Timing.WEIGHT_ONLY if only_weights else Timing.STATIC


def _is_dynamic(outcome: TensorOutcome) -> bool:
    return isinstance(outcome, Quantize) and outcome.spec.timing is Timing.DYNAMIC


def _yields_float(use: Use) -> bool:
    """True if a setting leaves results float: dynamic quantization is for inputs."""
    return isinstance(use, Float) or _is_dynamic(use)


def _conflict(match: Match, members: dict[Site, TensorOutcome]) -> AnnotationError:
    shown = "; ".join(f"{site}: {outcome}" for site, outcome in members.items())
    return AnnotationError(
        f"{match.rule.name} gives its inputs one scale, and the config asks for different ones: {shown}",
        where=match.program.describe(match.root),
        advice="set one spec for all of them, or FLOAT",
    )
