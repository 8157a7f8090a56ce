"""The matches of rules in a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from quantc.ir.program import Program
from quantc.patterns.rule import Match, Refusal, Rule, Rules
from quantc.patterns.rule_matcher import EVERYTHING, Admission, Matcher


@dataclass(frozen=True, eq=False)
class Index:
    """The calls of one graph, grouped by their target and the targets that feed them.

    Rules are tested against these groups, not against each node: most are ruled out for a whole group at once.
    """

    kinds: dict[Any, dict[frozenset[Any], list[fx.Node]]]
    positions: dict[fx.Node, int]

    @staticmethod
    def of(graph: fx.Graph) -> Index:
        kinds: dict[Any, dict[frozenset[Any], list[fx.Node]]] = {}
        positions: dict[fx.Node, int] = {}
        for position, node in enumerate(graph.nodes):
            if node.op != "call_function":
                continue
            positions[node] = position
            feeds = frozenset([source.target for source in node.all_input_nodes if source.op == "call_function"])
            kinds.setdefault(node.target, {}).setdefault(feeds, []).append(node)
        return Index(kinds, positions)

    def candidates(self, rule: Rule) -> list[fx.Node]:
        """The nodes that could be a rule's root, last first."""
        kinds = [
            nodes
            for target in rule.compiled.roots
            for feeds, nodes in self.kinds.get(target, {}).items()
            if rule.compiled.may_start(target, feeds)
        ]
        if len(kinds) == 1:
            return kinds[0][::-1]
        return sorted((node for nodes in kinds for node in nodes), key=self.positions.__getitem__, reverse=True)


@dataclass(frozen=True, eq=False)
class MatchSet:
    """The matches of a table in a program, in graph order. `reversed(matches)` takes consumers first."""

    table: Rules
    program: Program
    matches: tuple[Match, ...]
    _claims: Mapping[fx.Node, Match] = field(repr=False)
    admission: Admission = field(default=EVERYTHING, repr=False)

    def __iter__(self) -> Iterator[Match]:
        return iter(self.matches)

    def __reversed__(self) -> Iterator[Match]:
        return reversed(self.matches)

    def __len__(self) -> int:
        return len(self.matches)

    def by_node(self, node: fx.Node) -> Match | None:
        """The match that claims a node."""
        return self._claims.get(node)

    def of(self, *rules: str) -> tuple[Match, ...]:
        """The matches of the named rules."""
        self.table.check_known(*rules)
        return tuple(match for match in self.matches if match.rule.name in rules)

    def counts(self) -> dict[str, int]:
        """The number of matches of each rule, in the order of the table."""
        counts = Counter(match.rule.name for match in self.matches)
        return {name: counts[name] for name in self.table.names}

    def refusals(self, rules: Iterable[str] | None = None) -> Iterator[Refusal]:
        """The reasons why rules did not match where their root op is unclaimed. Computed lazily, never stored."""
        names = self.table.names if rules is None else tuple(rules)
        self.table.check_known(*names)
        matcher = Matcher(self.program, self.admission, dict(self._claims))
        for _, graph in self.program.graphs():
            for node in graph.nodes:
                if node.op != "call_function" or node in matcher.claims:
                    continue
                yield from self._refusals_at(matcher, node, names)

    def _refusals_at(self, matcher: Matcher, node: fx.Node, names: Sequence[str]) -> Iterator[Refusal]:
        for rule in self.table.by_size:
            if rule.name not in names or node.target not in rule.compiled.roots:
                continue
            outcome = matcher.attempt(rule, node)
            if isinstance(outcome, Refusal):
                yield outcome

    def __str__(self) -> str:
        head = f"{self.table.name}: {len(self.matches)} matches"
        return "\n".join([head, *(f"  {match}" for match in self.matches)])
