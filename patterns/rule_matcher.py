"""Trying rules on nodes: a `Match` if one fits, else a `Refusal` with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from quantc.errors import QuantcError
from quantc.ir.program import Program
from quantc.patterns.pattern_search import Search
from quantc.patterns.refusals import Cause, Condition, NotFree, Said, UsedElsewhere
from quantc.patterns.rule import Match, Predicate, Refusal, Rule, claimed_cause


def _nothing_against(match: Match) -> str | Cause | None:
    return None


@dataclass(frozen=True, eq=False)
class Admission:
    """Restrictions on matching, independent of the rules: excluded nodes, each with the reason, and a final
    condition."""

    left_out: Mapping[fx.Node, str] = field(default_factory=dict)
    why_not: Predicate = _nothing_against


EVERYTHING = Admission()


@dataclass(eq=False)
class Matcher:
    """Tries rules on the nodes of one program, and tracks claimed nodes."""

    program: Program
    admission: Admission = EVERYTHING
    claims: dict[fx.Node, Match] = field(default_factory=dict)
    _constants: dict[fx.Node, bool] = field(default_factory=dict)

    def attempt(self, rule: Rule, node: fx.Node) -> Match | Refusal:
        """Try a rule with `node` as its root."""
        search = Search(rule.compiled.root, node, self)
        found = self._run(search, rule)
        if found is not None:
            return found
        return Refusal(rule, node, search.why(), len(search.reached), search.why_at, search.reached)

    def find(self, rule: Rule, node: fx.Node) -> Match | None:
        """Like `attempt`, without formatting the reason."""
        return self._run(Search(rule.compiled.root, node, self), rule)

    def claim(self, match: Match) -> None:
        for node in match.nodes:
            self.claims[node] = match

    def _run(self, search: Search, rule: Rule) -> Match | None:
        found: list[Match] = []

        def accept(search: Search) -> bool:
            match = self._accept(search, rule)
            if match is not None:
                found.append(match)
            return match is not None

        owner = self.owner_of(search.root)
        if owner is not None:
            search.fail(search.root, lambda: owner)
            return None
        return found[0] if search.run(accept) else None

    def _accept(self, search: Search, rule: Rule) -> Match | None:
        """The match found by a search, unless its nodes are used elsewhere or a condition refuses it."""
        nodes = search.nodes
        for node, core in nodes.items():
            if node is search.root or core.shared or len(node.users) == 1:
                continue
            other = next((user for user in node.users if user not in nodes or nodes[user].shared), None)
            if other is not None:
                search.reject(node, lambda: UsedElsewhere(node, other))  # noqa: B023 - the loop ends here
                return None
        for name in rule.compiled.value_names:
            inner = search.bindings.get(name)
            if isinstance(inner, fx.Node) and inner in nodes and not nodes[inner].shared:
                text = f"{name} is {inner.name}, which is itself part of the match"
                search.reject(inner, lambda: Said(text))  # noqa: B023
                return None
        claimed = sorted(node for node, core in nodes.items() if not core.shared)
        bindings = {name: search.bindings.get(name) for name in rule.compiled.names}
        match = Match(rule, search.root, bindings, tuple(claimed), self.program)
        reason = rule.why_not(match) or self.admission.why_not(match)
        if reason is not None:
            search.reject(search.root, lambda: reason if isinstance(reason, Cause) else Condition("", reason))
            return None
        return match

    def is_constant(self, node: fx.Node) -> bool:
        """True if a node is a parameter, buffer or other tensor of the program."""
        if node.op != "get_attr":
            return False
        known = self._constants.get(node)
        if known is None:
            known = self._constants[node] = self._is_tensor(node)
        return known

    def _is_tensor(self, node: fx.Node) -> bool:
        try:
            return self.program.tensor(node) is not None
        except QuantcError:  # a nested graph without a module has no known constants
            return False

    def owner_of(self, node: fx.Node) -> Cause | None:
        """The reason why a node is not free: claimed by another match, or excluded."""
        match = self.claims.get(node)
        if match is not None:
            return claimed_cause(node, match)
        owner = self.admission.left_out.get(node)
        return None if owner is None else NotFree(node, owner)


__all__ = ["EVERYTHING", "Admission", "Match", "Matcher", "Refusal"]
