"""Rules, and tables of them. A table is a value: it can be added to, cut down, printed, and sent as JSON.

**Which match wins.** `RuleTable.match` walks each graph once to sort its nodes by op. Then the rules have their turn,
the largest first: most required nodes, then most nodes at all, then the order of the table. A rule tries its roots
from the end of the graph to the start, so that a chain is taken at its full length. A match claims its nodes, and
no later match can take them. Nothing depends on hashing or names: the same table on the same graph gives the same
matches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import fx

from quantc.errors import PatternError, QuantcError, UnknownNameError, suggest
from quantc.patterns import predicates
from quantc.patterns.compiled import Compiled, compile_pattern
from quantc.patterns.dsl import Items, Pattern
from quantc.patterns.match import EVERYTHING, Admission, Match, Matcher, Refusal
from quantc.patterns.predicates import Predicate
from quantc.patterns.refusals import Cause, Condition
from quantc.spec.formats import Offer

if TYPE_CHECKING:
    from quantc.ir.program import Program
    from quantc.patterns.explain_match import Explanation

SUPPORTS = frozenset({"qdq", "integer", "kernel", "delegate", "onnx"})
"""The levels a rule can be carried out at."""

Test: TypeAlias = str | Predicate
When: TypeAlias = "Test | Sequence[Test]"


class Roles(Mapping[str, str]):
    """What each name of a pattern is for: `{"x": "act", "w": "weight", "out": "act"}`. Cannot be changed."""

    __slots__ = ("_rows",)

    def __init__(self, rows: Mapping[str, str] | None = None) -> None:
        self._rows = dict(rows or {})

    def __getitem__(self, name: str) -> str:
        return self._rows[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __hash__(self) -> int:
        return hash(frozenset(self._rows.items()))

    def __repr__(self) -> str:
        return repr(self._rows)


@dataclass(frozen=True)
class Rule:
    """A pattern with a name, the roles of what it binds, and the conditions on which it is taken.

    `when` is the name of a registered predicate, a function, or several of these; each says why not, or None.
    `supports` are the levels at which the rule can be carried out. `static` says whether scales may be those that are
    known beforehand, `dynamic` whether they may be found as the program runs: always, where a config names the op, or not.
    """

    name: str
    pattern: Pattern
    roles: Mapping[str, str] = field(default_factory=Roles)
    when: When = ()
    supports: Set[str] = frozenset()
    static: Offer = Offer.YES
    dynamic: Offer = Offer.NO

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9_]+(-[a-z0-9_]+)*", self.name):
            raise PatternError(f"{self.name!r} is not a name for a rule", advice="use words and dashes: conv-clamp")
        if isinstance(self.pattern, Items):
            raise PatternError(f"rule {self.name!r} has a list for a pattern", advice="build one with op()")
        conditions = (self.when,) if isinstance(self.when, str) or callable(self.when) else tuple(self.when)
        object.__setattr__(self, "when", tuple(self._registered(condition) for condition in conditions))
        object.__setattr__(self, "roles", Roles(self.roles))
        object.__setattr__(self, "supports", frozenset(self.supports))
        known = (*self.compiled.names, "out")
        for name in self.roles:
            if name not in known:
                raise PatternError(
                    f"rule {self.name!r} gives {name!r} a role but binds no such name",
                    advice=suggest(name, known, noun="names"),
                )
        for level in sorted(self.supports - SUPPORTS):
            raise PatternError(
                f"rule {self.name!r} supports {level!r}, which is no level",
                advice=suggest(level, SUPPORTS, noun="levels"),
            )

    def _registered(self, condition: Test) -> Test:
        """A registered function goes by its name, so that a rule is the same however it was written."""
        if isinstance(condition, str):
            predicates.find(condition)
            return condition
        if not callable(condition):
            raise PatternError(
                f"rule {self.name!r} has the condition {condition!r}", advice="give a name or a function"
            )
        return predicates.name_of(condition) or condition

    @cached_property
    def compiled(self) -> Compiled:
        try:
            return compile_pattern(self.pattern)
        except PatternError as error:
            raise PatternError(error.what, where=f"rule {self.name!r}", advice=error.advice) from error

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: the rule as written, not as compiled."""
        return {name: item for name, item in self.__dict__.items() if name != "compiled"}

    @property
    def conditions(self) -> tuple[Test, ...]:
        """`when` as a tuple; registered predicates by name."""
        return self.when if isinstance(self.when, tuple) else ()

    def why_not(self, match: Match) -> Cause | None:
        """Why the conditions refuse a match; None if they do not."""
        for condition in self.conditions:
            function = predicates.find(condition) if isinstance(condition, str) else condition
            try:
                reason = function(match)
            except Exception as error:
                raise PatternError(
                    f"the condition {condition!r} of rule {self.name!r} failed: {error}",
                    where=match.program.describe(match.root),
                    advice="a condition returns why not, or None, for every match; it must not raise",
                ) from error
            if reason is not None:
                name = condition if isinstance(condition, str) else ""
                return reason if isinstance(reason, Cause) else Condition(name, reason)
        return None

    def __str__(self) -> str:
        return f"{self.name}: {self.pattern}"


@dataclass(frozen=True)
class RuleTable:
    """An ordered table of rules, matched together."""

    name: str
    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        counts = Counter(rule.name for rule in self.rules)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise PatternError(
                f"table {self.name!r} has more than one rule named {', '.join(map(repr, twice))}",
                advice="rename one, or leave one out with .without()",
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(rule.name for rule in self.rules)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Rule:
        self._check_known(name)
        return self.rules[self.names.index(name)]

    def __add__(self, other: RuleTable) -> RuleTable:
        """Both tables' rules, this one's first; no name may be in both."""
        return RuleTable(f"{self.name}+{other.name}", (*self.rules, *other.rules))

    def without(self, *names: str) -> RuleTable:
        """This table less the named rules."""
        self._check_known(*names)
        return replace(self, rules=tuple(rule for rule in self.rules if rule.name not in names))

    def only(self, *names: str) -> RuleTable:
        """The named rules of this table, in its order."""
        self._check_known(*names)
        return replace(self, rules=tuple(rule for rule in self.rules if rule.name in names))

    def _check_known(self, *names: str) -> None:
        for name in names:
            if name not in self.names:
                raise PatternError(
                    f"table {self.name!r} has no rule {name!r}", advice=suggest(name, self.names, noun="rules")
                )

    @cached_property
    def by_size(self) -> tuple[Rule, ...]:
        """The rules in the order they are tried."""
        return tuple(sorted(self.rules, key=lambda rule: (-rule.compiled.required, -rule.compiled.largest)))

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
        """Every rule that could have taken a node, and why it did or did not; the nearest first."""
        from quantc.patterns.explain_match import explain

        return explain(self, program, node, admission)

    def to_json(self) -> str:
        """The table as JSON text; `RuleTable.from_json` reads it back to an equal table."""
        from quantc.patterns.json_form import table_to_json

        return table_to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> RuleTable:
        """Read what `to_json` wrote. PatternError names the field that is wrong."""
        from quantc.patterns.json_form import table_from_json

        return table_from_json(text)

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {len(self.rules)} rules", *(f"  {rule}" for rule in self.rules)])


@dataclass(frozen=True, eq=False)
class Index:
    """The calls of one graph, sorted by what they call and what feeds them.

    Rules are held against these few kinds, not against each node: most are ruled out for a whole kind at once.
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

    table: RuleTable
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
        self.table._check_known(*rules)
        return tuple(match for match in self.matches if match.rule.name in rules)

    def counts(self) -> dict[str, int]:
        """How often each rule matched, in the order of the table."""
        counts = Counter(match.rule.name for match in self.matches)
        return {name: counts[name] for name in self.table.names}

    def refusals(self, rules: Iterable[str] | None = None) -> Iterator[Refusal]:
        """Why rules did not match where their root op stands unclaimed. Computed as you iterate, never stored."""
        names = self.table.names if rules is None else tuple(rules)
        self.table._check_known(*names)
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
