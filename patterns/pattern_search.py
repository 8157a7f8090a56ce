"""The backtracking matcher for compiled patterns.

A pattern is compiled to cores (see `compiled.py`). Matching keeps a stack of goals "this core must fit this value"; a
core with several alternatives leaves a choice point, and a failing goal backtracks to the latest one. Nothing recurses,
and a step limit bounds pathological patterns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from torch import fx

from quantc.patterns.graph_values import show
from quantc.patterns.refusals import Cause, Said

BUDGET = 20_000
"""Maximum number of goals for one rule at one node."""

Goals: TypeAlias = "tuple[Core, Any, Goals] | None"
Heads: TypeAlias = "frozenset[Any] | None"
"""The call targets a core can stand for; None if it also accepts values from outside the match."""


def _nothing() -> Cause:
    return Said("nothing was tried")


class Core(ABC):
    """One node of a compiled pattern."""

    __slots__ = ("heads", "id", "least", "most")

    def __init__(self, number: int, heads: Heads, least: frozenset[int], most: frozenset[int]) -> None:
        self.id = number
        self.heads = heads
        self.least = least
        """The ids of the ops in the smallest alternative."""
        self.most = most
        """The ids of the ops in the largest alternative."""

    @abstractmethod
    def enter(self, search: Search, value: Any) -> bool:
        """Fit a value, or push the goals that remain; False if it cannot fit."""


class NodeCore(Core):
    """A part that stands for a node of the match."""

    __slots__ = ("shared",)

    shared: bool
    """True if the node may have users outside the match."""


class Surroundings(Protocol):
    """The queries of a search about the program."""

    def is_constant(self, node: fx.Node) -> bool: ...

    def owner_of(self, node: fx.Node) -> Cause | None: ...


class Search:
    """One attempt: open goals, bindings, claimed nodes, choice points, and the furthest failure."""

    __slots__ = (
        "bindings",
        "choices",
        "furthest",
        "goals",
        "is_constant",
        "nodes",
        "owner_of",
        "reached",
        "root",
        "steps",
        "taken",
        "trail",
        "why",
        "why_at",
    )

    def __init__(self, core: Core, root: fx.Node, around: Surroundings) -> None:
        self.root = root
        self.is_constant = around.is_constant
        self.owner_of = around.owner_of
        self.goals: Goals = (core, root, None)
        self.bindings: dict[str, Any] = {}
        self.nodes: dict[fx.Node, NodeCore] = {}
        self.taken: dict[int, fx.Node] = {}
        self.choices: list[tuple[Goals, int]] = []
        self.trail: list[tuple[dict[Any, Any], Any]] = []
        self.steps = 0
        self.furthest = -1
        self.reached: tuple[fx.Node, ...] = ()
        self.why: Callable[[], Cause] = _nothing
        self.why_at: fx.Node = root

    def run(self, accept: Callable[[Search], bool]) -> bool:
        """Find the first fit that `accept` agrees to."""
        while True:
            if self.goals is None:
                advanced = accept(self)
                if advanced:
                    return True
            else:
                core, value, self.goals = self.goals
                self.steps += 1
                advanced = core.enter(self, value)
            if not advanced and not self._backtrack():
                return False

    def _backtrack(self) -> bool:
        if not self.choices:
            return False
        if self.steps > BUDGET:
            self.furthest = -1
            given_up = f"gave up after {BUDGET} steps: the pattern can fit in too many ways"
            return self.fail(self.root, lambda: Said(given_up))
        self.goals, mark = self.choices.pop()
        while len(self.trail) > mark:
            table, key = self.trail.pop()
            del table[key]
        return True

    def push(self, core: Core, value: Any) -> None:
        self.goals = (core, value, self.goals)

    def choose(self, core: Core, value: Any) -> None:
        """Push a choice point: an alternative to resume from if the present one fails."""
        self.choices.append(((core, value, self.goals), len(self.trail)))

    def claim(self, core: NodeCore, node: fx.Node) -> None:
        self.nodes[node] = core
        self.taken[core.id] = node
        self.trail.append((self.nodes, node))
        self.trail.append((self.taken, core.id))

    def bind(self, name: str, value: Any) -> bool:
        if name == "_":
            return True
        if name not in self.bindings:
            self.bindings[name] = value
            self.trail.append((self.bindings, name))
            return True
        known = self.bindings[name]
        if known is value or known == value:
            return True
        return self.fail(value, lambda: Said(f"{name} is {show(known)} already, so it cannot be {show(value)} too"))

    def fail(self, at: Any, why: Callable[[], Cause]) -> bool:
        """Record why this alternative fails, if no other came further. Always False."""
        return self._note(2 * len(self.nodes), at, why)

    def reject(self, at: fx.Node, why: Callable[[], Cause]) -> bool:
        """The same where the nodes fit but may not be taken, which ranks nearer than a node that does not fit."""
        return self._note(2 * len(self.nodes) + 1, at, why)

    def _note(self, score: int, at: Any, why: Callable[[], Cause]) -> bool:
        if score > self.furthest:
            self.furthest = score
            self.reached = tuple(self.nodes)
            self.why = why
            self.why_at = at if isinstance(at, fx.Node) else next(reversed(self.nodes), self.root)
        return False
