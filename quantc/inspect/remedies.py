"""Maps the reason why a node is float to the changes that would quantize it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from quantc.annotate.match_operands import slots_of
from quantc.annotate.reasons import Reason, Reasons, Why
from quantc.config.config import QuantConfig
from quantc.config.config_rule import ConfigRule
from quantc.config.resolve import Resolution
from quantc.inspect.changes import (
    ByHand,
    Cast,
    Change,
    MakeConstant,
    QuantizeInput,
    QuantizeReader,
    RemoveConfigRule,
    RemoveRule,
    SetArgument,
    SingleUser,
    total_cost,
)
from quantc.inspect.new_rules import rule_for
from quantc.inspect.other_techniques import OtherTechniques
from quantc.ir.decisions import Float
from quantc.ir.dialect import operands
from quantc.ir.site_index import outputs_of
from quantc.patterns import refusals
from quantc.patterns.checks import Check, Comparison, Plain
from quantc.patterns.operand_patterns import LeafKind
from quantc.patterns.rule import Match, Refusal

MAX_WAITING = 64
"""Maximum number of nodes in the search for those that they wait for."""
MAX_BLAMED = 3
"""For how many of those a change is looked for."""


class Remedies:
    """Finds changes for the nodes of one program."""

    def __init__(self, reasons: Reasons) -> None:
        self.reasons = reasons
        self.program = reasons.program
        self._resolutions: dict[QuantConfig, Resolution] = {}
        self.paths = {graph: path for path, graph in self.program.graphs()}
        self.techniques = OtherTechniques(reasons, self.paths)

    def for_node(self, node: fx.Node) -> tuple[Change[Any], ...]:
        """Changes that would let a rule claim a float node, smallest first."""
        found: list[Change[Any]] = []
        for change in self._find(node, self.reasons(node)):
            if change not in found:
                found.append(change)
        return tuple(sorted(found, key=total_cost))

    def _find(self, node: fx.Node, reason: Reason) -> Iterator[Change[Any]]:
        if self.techniques.asks(node) or reason.why is Why.NOT_NAMED:
            yield from self.techniques.for_node(node, reason)
        elif reason.why is Why.CONFIG:
            yield from self._config(node)
        elif reason.follower is not None:
            yield from self._feeding(reason.follower)
        if reason.why is Why.NOT_NAMED and reason.refusal is None:
            yield self._by_hand("name-products", node, 'prepare it with config.set_op("matmul", spec)')
        if reason.why is Why.OPAQUE:
            yield self._by_hand("capture-inside", node, f"spell {node.name} with ATen ops, or do not keep it as a leaf")
        elif reason.why in (Why.REFUSED, Why.NO_RULE):
            tried = [refusal for trial in self.reasons.trials.tables for refusal in trial.refusals(node)]
            for refusal in tried:
                yield from self._for_cause(refusal.cause, refusal)
            if not self.techniques.asks(node) and all(isinstance(refusal.cause, refusals.WrongOp) for refusal in tried):
                yield from self._rules(node)  # no rule is for the op by itself; one that is had its reasons

    def _name(self, node: fx.Node) -> str:
        path = self.paths[node.graph]
        return f"{path}/{node.name}" if path else node.name

    def _by_hand(self, what: str, node: fx.Node, text: str) -> ByHand:
        return ByHand(what, self._name(node), text)

    # -- by the config -----------------------------------------------------------------------------------------

    def _config(self, node: fx.Node) -> Iterator[Change[Any]]:
        """The rules that leave a node float: the last that matches, and those before it that say the same."""
        config = self.program.plan.config or QuantConfig()
        removed: list[ConfigRule] = []
        while (setting := self._resolve(config).setting(node)) is not None and isinstance(setting.use, Float):
            removed.append(setting.rule)
            config = QuantConfig(rules=tuple(rule for rule in config.rules if rule != setting.rule))
        if removed:
            yield RemoveConfigRule(self._name(node), tuple(removed))

    def _resolve(self, config: QuantConfig) -> Resolution:
        """A config against the program; several nodes are often float for one rule."""
        if config not in self._resolutions:
            self._resolutions[config] = config.resolve(self.program)
        return self._resolutions[config]

    # -- by what it is given, and who reads it -------------------------------------------------------------------

    def _feeding(self, match: Match) -> Iterator[Change[Any]]:
        """A propagating rule depends on its inputs, and otherwise on the users of its result."""
        givers, readers = self._upstream(match), self._downstream(match)
        changes: list[Change[Any]] = []
        for giver in (givers or ())[:MAX_BLAMED]:
            changes += (QuantizeInput(self._name(giver), change) for change in self.for_node(giver)[:1])
        if givers == []:
            for reader in readers[:MAX_BLAMED]:
                changes += (QuantizeReader(self._name(reader), change) for change in self.for_node(reader)[:1])
        yield from changes or self._rules(match.root)

    def _upstream(self, match: Match) -> list[fx.Node] | None:
        """The float ops that a match would have to be fed by, looking through others that wait; None if it is fed by
        an input or a constant, which nothing quantizes."""
        found: dict[fx.Node, None] = {}
        pending, seen = [match], {match.root}
        while pending and len(seen) < MAX_WAITING:
            for slot in slots_of(pending.pop()):
                value = _op_of(slot.value)
                waiting = self._waiting(value)
                if value.op != "call_function":
                    return None
                if waiting is None and value not in self.program.plan.claims:
                    found.setdefault(value)
                elif waiting is not None and waiting.root not in seen:
                    seen.add(waiting.root)
                    pending.append(waiting)
        return list(found)

    def _downstream(self, match: Match) -> list[fx.Node]:
        """Float users of a match's result, through others that depend on it."""
        found: dict[fx.Node, None] = {}
        pending, seen = [match.root], {match.root}
        while pending and len(seen) < MAX_WAITING:
            for reader in (user for output in outputs_of(pending.pop()) for user in output.users):
                waiting = self._waiting(reader)
                if waiting is None and reader.op == "call_function" and reader not in self.program.plan.claims:
                    found.setdefault(reader)
                elif waiting is not None and waiting.root not in seen:
                    seen.add(waiting.root)
                    pending.append(waiting.root)
        return list(found)

    def _waiting(self, node: fx.Node) -> Match | None:
        """Match of a propagating node whose inputs are not quantized."""
        if node in self.program.plan.claims:
            return None
        return next((match for trial in self.reasons.trials.tables if (match := trial.follower(node))), None)

    # -- by rules ------------------------------------------------------------------------------------------------

    def _rules(self, node: fx.Node) -> Iterator[Change[Any]]:
        """A rule of its own for the op, in the backend that has the first choice."""
        for trial in self.reasons.trials.tables[:1]:
            rule = rule_for(node, trial)
            if rule is not None:
                yield rule

    def _for_cause(self, cause: refusals.Cause, refusal: Refusal) -> Iterator[Change[Any]]:
        match cause:
            case refusals.WrongArguments():
                yield from self._arguments(cause)
            case refusals.UsedElsewhere(node=node, other=other):
                inside = {refusal.node, *refusal.reached}
                keep = tuple(user.name for user in node.users if user in inside)
                yield SingleUser(self._name(node), other.name, keep)
            case refusals.WrongType(found=found, dtypes=dtypes) if found.dtype.is_floating_point and dtypes:
                nodes = sorted({refusal.node, *refusal.reached})
                yield Cast(tuple(self._name(node) for node in nodes), dtypes[0])
            case refusals.UnknownType(value=value):
                text = "capture with example inputs: qc.capture(model, example_inputs)"
                yield self._by_hand("capture-with-examples", value, text)
            case refusals.WrongOperand(found=fx.Node() as operand, wanted=LeafKind.CONST):
                yield from self._constant(operand, refusal)
            case refusals.NotFree(node=node) if node in self.reasons.trials.left_out:
                yield from self._config(node)
            case refusals.Claimed(node=node, rule=rule):
                yield RemoveRule(self._name(node), rule)
            case refusals.WrittenTo(value=value):
                yield self._by_hand(
                    "avoid-write", value, f"do not write to {value.name} in place, nor let a module kept whole read it"
                )
            case refusals.WrongOp() | refusals.WrongOperand() | refusals.WrongType():
                yield self._by_hand("replace-op", refusal.at, f"for {refusal.rule.name}: {cause}")
            case refusals.WrongValue():
                yield from self._value(cause, refusal)
            case refusals.Condition() | refusals.ComputedArgument():
                yield self._by_hand("meet-condition", refusal.at, f"for {refusal.rule.name}: {cause}")
            case _:
                return

    def _arguments(self, cause: refusals.WrongArguments) -> Iterator[Change[Any]]:
        values = [(fault.argument, _nearest_accepted(fault.wanted, fault.found)) for fault in cause.faults]
        if all(value is not None for _, value in values):
            yield SetArgument(self._name(cause.node), tuple(values))

    def _value(self, cause: refusals.WrongValue, refusal: Refusal) -> Iterator[Change[Any]]:
        """A plain operand: the one argument that holds it, if that can be told."""
        node = refusal.at
        if node.op != "call_function":
            return
        names = [name for name, value in operands(node) if value is cause.found or value == cause.found]
        if len(names) == 1:
            yield SetArgument(self._name(node), ((names[0], cause.wanted),))

    def _constant(self, operand: fx.Node, refusal: Refusal) -> Iterator[Change[Any]]:
        inside = (refusal.node, *refusal.reached)
        reader = next((node for node in inside if operand in node.all_input_nodes), None)
        if reader is not None:
            yield MakeConstant(self._name(reader), self._name(operand))


def _op_of(value: fx.Node) -> fx.Node:
    """The op that yields a value: the one an item is picked from."""
    source = value.args[0] if value.target is operator.getitem else value
    return source if isinstance(source, fx.Node) else value


def _nearest_accepted(check: Check, found: Any) -> Plain:
    """The value nearest to one that is refused; None if there is no telling."""
    items = list(found) if isinstance(found, list | tuple) else None
    value = check.value
    match check.comparison:
        case Comparison.EQUALS:
            one: Any = value
        case Comparison.ONE_OF if isinstance(value, tuple):
            one = _nearest(value, found)
        case Comparison.AT_LEAST | Comparison.AT_MOST:
            limit: Any = value
            bound = max if check.comparison is Comparison.AT_LEAST else min
            return tuple(bound(item, limit) for item in items) if items is not None else value
        case _:
            return None
    if items is not None and not isinstance(one, tuple):
        return (one,) * len(items)
    return one  # type: ignore[no-any-return]


def _nearest(values: tuple[Any, ...], found: Any) -> Any:
    if any(type(value) not in (int, float) for value in (*values, found)):
        return values[0]
    return min(values, key=lambda value: abs(value - found))
