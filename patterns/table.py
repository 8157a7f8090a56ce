"""Rules and rule tables. A table is a value: it can be extended, filtered, printed, and serialized to JSON.

**Precedence.** `RuleTable.match` walks each graph once to index its nodes by op. Then the rules are tried, the largest
first: most required nodes, then most nodes in all, then the order of the table. A rule tries its roots from the end of
the graph to the start, so that a chain is matched at its full length. A match claims its nodes, and no later match can
take them. Nothing depends on hashing or names: the same table on the same graph gives the same matches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from quantc.ir.program import Program
from quantc.patterns.explain_match import Explanation, explain_among
from quantc.patterns.json_form import from_json, to_json
from quantc.patterns.program_matches import Index, MatchSet
from quantc.patterns.rule import Match, Roles, Rule, Rules
from quantc.patterns.rule_matcher import EVERYTHING, Admission, Matcher


@dataclass(frozen=True)
class RuleTable(Rules):
    """An ordered table of rules, matched together."""

    def __add__(self, other: RuleTable) -> RuleTable:
        """Both tables' rules, this one's first; names must be distinct."""
        return RuleTable(f"{self.name}+{other.name}", (*self.rules, *other.rules))

    def without(self, *names: str) -> RuleTable:
        """This table without the named rules."""
        self.check_known(*names)
        return replace(self, rules=tuple(rule for rule in self.rules if rule.name not in names))

    def only(self, *names: str) -> RuleTable:
        """The named rules of this table, in its order."""
        self.check_known(*names)
        return replace(self, rules=tuple(rule for rule in self.rules if rule.name in names))

    def match(self, program: Program, admission: Admission = EVERYTHING) -> MatchSet:
        """Every match in every graph of a program; no node is in two of them."""
        matcher = Matcher(program, admission)
        found: list[Match] = []
        for _, graph in program.graphs():
            index = Index.of(graph)
            in_graph: list[Match] = []
            for rule in self.by_size:
                for node in index.candidates(rule):
                    if node in matcher.claims:
                        continue
                    match = matcher.find(rule, node)
                    if match is not None:
                        matcher.claim(match)
                        in_graph.append(match)
            found.extend(sorted(in_graph, key=lambda match: index.positions[match.root]))
        return MatchSet(self, program, tuple(found), matcher.claims, admission)

    def explain(self, program: Program, node: fx.Node | str, admission: Admission = EVERYTHING) -> Explanation:
        """Every rule that could have taken a node, with the reason why it did or did not; the nearest first."""
        return explain_among(self.match(program, admission), node)

    def to_json(self) -> str:
        """The table as JSON text; `RuleTable.from_json` reads it back to an equal table."""
        return to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> RuleTable:
        """The inverse of `to_json`. PatternError names the field that is wrong."""
        return from_json(text, RuleTable)

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {len(self.rules)} rules", *(f"  {rule}" for rule in self.rules)])


__all__ = ["MatchSet", "Roles", "Rule", "RuleTable"]
