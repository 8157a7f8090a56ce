"""Reruns the tables of a program's quantizer to learn why they left nodes alone. Linear in nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from quantc.annotate.annotator import QUANTIZABLE, Annotator
from quantc.annotate.config_requests import UNNAMED
from quantc.annotate.match_operands import slots_of
from quantc.annotate.quantizer import PASS, Backend, Quantizer, Quantizers, TableQuantizer
from quantc.annotate.table_annotation import TableAnnotation
from quantc.config.resolve import Resolution
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from quantc.ir.site_index import outputs_of
from quantc.ir.sites import NodeTable
from quantc.ir.types import DTYPE_NAMES, TensorType, type_of
from quantc.patterns.explain_match import Explanation, best_refusal, explain_among
from quantc.patterns.operand_patterns import LeafKind
from quantc.patterns.refusals import Cause, Condition, Said, UnknownType, WrittenTo, WrongOperand, WrongType
from quantc.patterns.rule import Predicate
from quantc.patterns.rule_matcher import Admission, Match, Matcher, Refusal
from quantc.patterns.table import MatchSet, Rule, RuleTable
from quantc.spec.formats import Offer, Role, Timing


@dataclass(eq=False)
class Trial:
    """One backend's table on a program, in the state it was annotated in."""

    backend: Backend
    program: Program
    admission: Admission

    @property
    def table(self) -> RuleTable:
        return self.backend.table

    @cached_property
    def matches(self) -> MatchSet:
        return self.table.match(self.program, self.admission)

    @cached_property
    def nearest(self) -> dict[fx.Node, Refusal]:
        """For each unclaimed node that a rule was tried on, the refusal that came furthest."""
        found: dict[fx.Node, Refusal] = {}
        for refusal in self.matches.refusals():
            for node in dict.fromkeys((refusal.node, *refusal.reached)):
                known = found.get(node)
                if known is None or _nearness(refusal) > _nearness(known):
                    found[node] = refusal
        return found

    @cached_property
    def by_target(self) -> dict[Any, list[Rule]]:
        """The rules that mention each op."""
        found: dict[Any, list[Rule]] = {}
        for rule in self.table.by_size:
            for target in rule.compiled.targets:
                found.setdefault(target, []).append(rule)
        return found

    def refusal(self, node: fx.Node) -> Refusal | None:
        """The refusal of the nearest rule; None if no rule mentions the node's op."""
        if node in self.nearest:
            return self.nearest[node]
        return next(iter(self.refusals(node)), None)

    def refusals(self, node: fx.Node) -> list[Refusal]:
        """The refusal of each rule that mentions a node's op, the nearest first."""
        rules = self.by_target.get(node.target, []) if node.op == "call_function" else []
        free = Matcher(self.program, self.admission)
        found = [best_refusal(rule, node, self.matches, free) for rule in rules]
        return sorted(found, key=_nearness, reverse=True)

    def fits_unnamed(self, node: fx.Node, timing: Timing) -> bool:
        """True if only an unknown type or an in-place write keeps a rule, which need not be named, from a node."""
        nearest = self.refusal(node)
        is_kept = nearest is not None and isinstance(nearest.cause, UnknownType | WrittenTo)
        if nearest is None or not is_kept:
            return False
        return (nearest.rule.dynamic if timing is Timing.DYNAMIC else nearest.rule.static) is Offer.YES

    def follower(self, node: fx.Node) -> Match | None:
        """The match that would propagate the quantization of a node's input, if that were quantized."""
        match = self.matches.by_node(node)
        return match if match is not None and PASS in match.rule.roles.values() else None

    def explain(self, node: fx.Node) -> Explanation:
        return explain_among(self.matches, node)


def _nearness(refusal: Refusal) -> tuple[int, int, int]:
    """Progress of a rule; of two, the one that is rather for the op."""
    return refusal.progress, _fitness(refusal), refusal.progress - refusal.rule.compiled.required


def _fitness(refusal: Refusal) -> int:
    """0 where the pattern does not fit, 1 where the config would have to name the op; 2 where a condition refuses it, or
    the tensors as they are: another dtype, no known type, or writes in place."""
    if refusal.reason in UNNAMED:
        return 1
    cause = refusal.cause
    if isinstance(cause, WrongType):
        return 0 if cause.is_rank else 2
    return 2 if isinstance(cause, Condition | UnknownType | WrittenTo) else 0


@dataclass(eq=False)
class Trials:
    """Everything that decided about a program: its config, and its quantizers in order of precedence."""

    program: Program
    members: tuple[Quantizer, ...] = field(init=False)

    def __post_init__(self) -> None:
        quantizer = self.program.plan.quantizer
        self.members = () if quantizer is None else tuple(_members(quantizer))

    @property
    def names(self) -> str:
        return ", ".join(member.name for member in self.members)

    @cached_property
    def config(self) -> Resolution:
        config = self.program.plan.config
        return Resolution() if config is None else config.resolve(self.program)

    @cached_property
    def left_out(self) -> dict[fx.Node, str]:
        """The nodes excluded from all rules, with the reason."""
        return Annotator(self.program, self.config, Plan()).left_out

    @cached_property
    def tables(self) -> tuple[Trial, ...]:
        """A trial for each quantizer that has a table."""
        earlier: set[str] = set()
        found: list[Trial] = []
        for member in self.members:
            if isinstance(member, TableQuantizer):
                found.append(self._trial(member, earlier))
            earlier.add(member.name)
        return tuple(found)

    def _trial(self, member: TableQuantizer, earlier: set[str]) -> Trial:
        claims = self.program.plan.claims.rows.items()
        taken = {node: claim for node, claim in claims if claim.quantizer in earlier}
        annotator = Annotator(self.program, self.config, Plan(claims=NodeTable(taken)))
        admission = TableAnnotation(member.backend, annotator).admission
        tensors = _Tensors(member.backend, annotator, admission.why_not)
        return Trial(member.backend, self.program, Admission(admission.left_out, tensors.why_not))

    @cached_property
    def operators(self) -> frozenset[str]:
        """The ops that quantizers without a table support."""
        others = (member for member in self.members if not isinstance(member, TableQuantizer))
        return frozenset(op for member in others for op in member.supported_operators())


@dataclass(frozen=True, eq=False)
class _Tensors:
    """The objections of an annotation to a match, as a cause with the tensor concerned where it can be determined."""

    backend: Backend
    annotator: Annotator
    said: Predicate

    def why_not(self, match: Match) -> str | Cause | None:
        reason = self.said(match)
        if not isinstance(reason, str):
            return reason
        for value in (*(slot.value for slot in slots_of(match)), *outputs_of(match.root)):
            if self.annotator.why_not_tensor(value) == reason:
                return _cause(value, reason)
        for slot in slots_of(match):
            role = match.rule.roles[slot.name]
            if slot.value.op != "get_attr" and role in self.backend.roles and self._is_weight(role):
                return WrongOperand(slot.value, LeafKind.CONST, slot.name, reason)
        return reason

    def _is_weight(self, role: str) -> bool:
        return self.backend.outcome(role).spec.role is Role.WEIGHT


def _cause(value: fx.Node, reason: str) -> Cause:
    kind = type_of(value)
    if kind is None:
        return UnknownType(value, reason)
    if not isinstance(kind, TensorType):
        return Said(reason)
    if kind.dtype in QUANTIZABLE:
        return WrittenTo(value, reason)
    return WrongType(value, kind, tuple(DTYPE_NAMES[dtype] for dtype in QUANTIZABLE), (), reason)


def _members(quantizer: Quantizer) -> Iterator[Quantizer]:
    """The members of a composition, recursively."""
    if not isinstance(quantizer, Quantizers):
        yield quantizer
        return
    for member in quantizer.members:
        yield from _members(member)
