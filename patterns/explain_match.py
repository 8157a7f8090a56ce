"""Explanations of why each rule of a table did or did not take a node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from itertools import islice
from typing import Any

from torch import fx

from quantc.errors import QuantcError, UnknownNameError
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.patterns.program_matches import MatchSet
from quantc.patterns.refusals import Cause, Said
from quantc.patterns.rule import Match, Refusal, Rule, claimed_cause
from quantc.patterns.rule_matcher import Matcher

MAX_ROOTS = 64
"""Maximum number of downstream nodes tried as roots. A hub has too many, and fits no pattern anyway."""


class PatternPosition(Enum):
    """The part of the pattern that the node was tried as."""

    ROOT = "root"
    INNER = "inner"


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of one rule: whether it took the node, and if not, its progress and the reason."""

    rule: str
    matched: bool
    place: PatternPosition
    root: str
    reason: str
    progress: int
    required: int
    at: str
    cause: Cause | None = None
    """The reason as data; None for the rule that took the node."""

    def __str__(self) -> str:
        place = "" if self.place is PatternPosition.ROOT else f" (root {self.root})"
        if self.progress >= self.required:
            return f"{self.rule}{place}: {self.reason}"
        return f"{self.rule}{place}: {self.reason} [{self.progress} of {self.required} nodes fitted]"

    def to_data(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "matched": self.matched,
            "place": self.place.value,
            "root": self.root,
            "reason": self.reason,
            "progress": self.progress,
            "required": self.required,
            "at": self.at,
            "cause": None if self.cause is None else self.cause.to_data(),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every rule that names a node's op: the one that took it first, then the nearest misses."""

    table: str
    node: str
    op: str
    tried: tuple[Tried, ...]
    others: int
    """The number of rules of the table without this op."""

    @property
    def matched(self) -> str | None:
        """The name of the rule that took the node."""
        return next((row.rule for row in self.tried if row.matched), None)

    def __str__(self) -> str:
        verdict = f"taken by {self.matched}" if self.matched else "taken by no rule"
        lines = [f"{self.node} ({self.op}): {verdict} of {self.table}"]
        lines += [f"  {'✓' if row.matched else '✗'} {row}" for row in self.tried]
        if self.others:
            lines.append(f"  {self.others} other rule{'s' if self.others > 1 else ''} without {self.op}")
        return "\n".join(lines)

    def to_json(self) -> str:
        data = {
            "table": self.table,
            "node": self.node,
            "op": self.op,
            "matched": self.matched,
            "tried": [row.to_data() for row in self.tried],
            "others": self.others,
        }
        return json.dumps(data, indent=2, ensure_ascii=False)


def _node(program: Program, name: str) -> fx.Node:
    try:
        return program.node(name)
    except UnknownNameError as error:
        paths = {origin.module_path for origin in program.origins.rows.values() if origin.module_path}
        close = get_close_matches(name, paths, n=3)
        if close:
            error.advice = f"{error.advice}; or the module {' or '.join(close)}?"
        raise


def resolve_node(program: Program, node: fx.Node | str) -> fx.Node:
    """A node given as itself, by name, or by the path of the module whose one op it is."""
    if isinstance(node, str):
        if not node:
            raise UnknownNameError(
                "the name of the node is empty",
                where=program.name,
                advice="give the name of a node, or the path of a module",
            )
        inside = [] if program.has_node(node) else [x for x in program.module_nodes(node) if x.op.startswith("call_")]
        if len(inside) > 1:
            names = ", ".join(found.name for found in inside)
            raise UnknownNameError(f"{node!r} is a module of {len(inside)} ops", advice=f"ask for one: {names}")
        return inside[0] if inside else _node(program, node)
    if not isinstance(node, fx.Node):
        raise QuantcError(f"{node!r} is not a node", advice="give a node or its name")
    return node


def explain_among(matches: MatchSet, node: fx.Node | str) -> Explanation:
    """Try every rule that mentions the node's op, with the node as root and as inner node."""
    table, program, admission = matches.table, matches.program, matches.admission
    node = resolve_node(program, node)
    rules = [rule for rule in table.by_size if node.op == "call_function" and node.target in rule.compiled.targets]
    free = Matcher(program, admission)
    tried = [_attempt(rule, node, matches, free) for rule in rules]
    tried.sort(key=lambda row: (not row.matched, -row.progress, row.progress - row.required))
    return Explanation(table.name, node.name, op_name(node), tuple(tried), len(table) - len(rules))


def _attempt(rule: Rule, node: fx.Node, matches: MatchSet, free: Matcher) -> Tried:
    taken = matches.by_node(node)
    if taken is not None and taken.rule is rule:
        place = PatternPosition.ROOT if taken.root is node else PatternPosition.INNER
        names = ", ".join(part.name for part in taken.nodes)
        size = len(taken.nodes)
        return Tried(rule.name, True, place, taken.root.name, f"matched {names}", size, size, node.name)
    best = best_refusal(rule, node, matches, free)
    place = PatternPosition.ROOT if best.node is node else PatternPosition.INNER
    required = rule.compiled.required
    return Tried(
        rule.name, False, place, best.node.name, best.reason, best.progress, required, best.at.name, best.cause
    )


def best_refusal(rule: Rule, node: fx.Node, matches: MatchSet, free: Matcher) -> Refusal:
    """The attempt that came furthest, preferably among those in which the node took part."""
    refusals = []
    for root in _roots(rule, node):
        outcome = free.attempt(rule, root)
        if isinstance(outcome, Refusal):
            refusals.append(outcome)
        elif node in outcome.nodes:
            refusals.append(_overlap_refusal(outcome, matches))
    if refusals:
        return max(refusals, key=lambda refusal: (_took_part(node, refusal), refusal.progress))
    users = ", ".join(user.name for user in sorted(node.users)[:3]) or "nothing"  # in the order of the graph
    reason = f"{node.name} cannot end this rule, and it feeds {users}, which does not lead to a node that can"
    return Refusal(rule, node, Said(reason), 0, node)


def _took_part(node: fx.Node, refusal: Refusal) -> bool:
    return node in (refusal.node, refusal.at, *refusal.reached)


def _overlap_refusal(match: Match, matches: MatchSet) -> Refusal:
    """The refusal of a match that fits by itself, but whose nodes went to another."""
    for node in match.nodes:
        winner = matches.by_node(node)
        if winner is not None:
            cause = claimed_cause(node, winner, "it fits, but ")
            return Refusal(match.rule, match.root, cause, len(match.nodes), node, match.nodes)
    lost = Said("it fits by itself, but not with the choices made elsewhere in the graph")
    return Refusal(match.rule, match.root, lost, len(match.nodes), match.root, match.nodes)


def _roots(rule: Rule, node: fx.Node) -> Iterator[fx.Node]:
    """The candidate roots of a rule: the node itself, then what it feeds through ops of the pattern."""
    compiled = rule.compiled
    if node.target in compiled.roots:
        yield node
    seen = {node}
    layer = [node]
    for _ in range(compiled.largest - 1):
        users = dict.fromkeys(user for source in layer for user in islice(source.users, MAX_ROOTS))
        layer = [user for user in users if user not in seen and user.target in compiled.targets]
        seen.update(layer)
        yield from (user for user in layer if user.target in compiled.roots)
        if len(seen) > MAX_ROOTS:
            return
