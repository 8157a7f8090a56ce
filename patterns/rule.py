"""A rule, and what comes of it at a node: a `Match` when it fits, a `Refusal` with its reason when it does not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeAlias

from torch import fx

from quantc.errors import PatternError, UnknownNameError, suggest
from quantc.ir.program import Program
from quantc.patterns import predicates
from quantc.patterns.compile_pattern import Compiled, compile_pattern
from quantc.patterns.dsl import Items, Pattern
from quantc.patterns.refusals import Cause, Claimed, Condition
from quantc.spec.formats import Offer

SUPPORTS = frozenset({"qdq", "integer", "kernel", "delegate", "onnx"})
"""The levels a rule can be supported at."""


class Predicate(Protocol):
    """A condition on a match: the reason against it, as text or as a cause that `explain` can act on; None if it
    holds."""

    def __call__(self, match: Match, /) -> str | Cause | None: ...


Test: TypeAlias = str | Predicate
When: TypeAlias = "Test | Sequence[Test]"


class Roles(Mapping[str, str]):
    """The role of each name of a pattern: `{"x": "act", "w": "weight", "out": "act"}`. Immutable."""

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
    """A named pattern, with the roles of its bindings, and conditions.

    `when` is the name of a registered predicate, a function, or several of these; each returns the reason against a
    match, or None. `supports` are the levels at which the rule can be carried out. `static` and `dynamic` say whether
    the rule supports that technique: by default, only where a config names the op, or never.
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
        object.__setattr__(self, "when", tuple(self._name_registered(condition) for condition in conditions))
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

    def _name_registered(self, condition: Test) -> Test:
        """Replace a registered function by its name, so that a rule is equal however it was written."""
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
        """The state for copying and pickling: the rule as written, not as compiled."""
        return {name: item for name, item in self.__dict__.items() if name != "compiled"}

    @property
    def conditions(self) -> tuple[Test, ...]:
        """`when` as a tuple; registered predicates by name."""
        return self.when if isinstance(self.when, tuple) else ()

    def why_not(self, match: Match) -> Cause | None:
        """The reason why the conditions refuse a match; None if they do not."""
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


@dataclass(frozen=True, slots=True)
class Match:
    """A rule that fits, with its bindings.

    `match["w"]` is the binding of `w`: a node, a number, a tuple of nodes for `xs*`, or None if absent; `match["out"]`
    is the root. `nodes` are the nodes the match claims, in graph order. Bindings reflect the graph at the time of
    matching; a pass that rewrites as it goes takes the matches in reverse, or reads operands anew.
    """

    rule: Rule = field(hash=False)
    root: fx.Node
    bindings: Mapping[str, Any] = field(hash=False)
    nodes: tuple[fx.Node, ...]
    program: Program = field(repr=False, compare=False)

    def __getitem__(self, name: str) -> Any:
        if name == "out":
            return self.root
        try:
            return self.bindings[name]
        except KeyError:
            raise UnknownNameError(
                f"rule {self.rule.name!r} binds no {name!r}", advice=suggest(name, self.bindings, noun="names")
            ) from None

    def node(self, name: str) -> fx.Node:
        """The binding of `name`, if that is a node."""
        value = self[name]
        if isinstance(value, fx.Node):
            return value
        raise PatternError(
            f"{name!r} of rule {self.rule.name!r} is {value!r}, not a node",
            where=self.program.describe(self.root),
            advice=f"use match[{name!r}] for what may be absent or a number",
        )

    def __str__(self) -> str:
        return f"{self.rule.name} at {self.root.name} ({', '.join(node.name for node in self.nodes)})"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule that does not fit, with the reason: `progress` nodes fitted before `cause` came up at the node `at`."""

    rule: Rule = field(hash=False)
    node: fx.Node
    cause: Cause
    progress: int
    at: fx.Node
    reached: tuple[fx.Node, ...] = ()
    """The nodes that fitted."""

    @property
    def reason(self) -> str:
        """The cause as text."""
        return str(self.cause)

    def __str__(self) -> str:
        return f"{self.rule.name} at {self.node.name}: {self.reason}"


def claimed_cause(node: fx.Node, match: Match, before: str = "") -> Claimed:
    """The cause for a node that another match has claimed."""
    text = f"{before}{node.name} is claimed by {match.rule.name} at {match.root.name}"
    return Claimed(node, match.rule.name, match.root, text)


@dataclass(frozen=True)
class Rules:
    """Rules in an order, by name."""

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
        self.check_known(name)
        return self.rules[self.names.index(name)]

    def check_known(self, *names: str) -> None:
        for name in names:
            if name not in self.names:
                raise PatternError(
                    f"table {self.name!r} has no rule {name!r}", advice=suggest(name, self.names, noun="rules")
                )

    @cached_property
    def by_size(self) -> tuple[Rule, ...]:
        """The rules in the order they are tried."""
        return tuple(sorted(self.rules, key=lambda rule: (-rule.compiled.required, -rule.compiled.largest)))
