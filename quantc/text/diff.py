"""Structural diff of two Programs, in lines of the text dump.

Nodes are paired in one walk over the second program. A node is first looked up by its computation (same op, same
arguments, operands that are already paired), which is independent of names. Failing that, a node of the same name is
taken to be the same node, changed; failing that, the next node of the same op, if its name is gone. The cost is linear.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from torch import fx

from quantc.ir.program import Program
from quantc.text.digests import Constants
from quantc.text.node_printer import GraphLines
from quantc.text.pytree_text import write_spec

Kind = Literal["removed", "added", "changed", "renamed", "moved"]


@dataclass(frozen=True, slots=True)
class TextChange:
    """One node that differs. `before` and `after` are its lines, without origins."""

    kind: Kind
    graph: str
    name: str
    before: str | None = None
    after: str | None = None
    follows: str | None = None
    """The unchanged line above it, for context."""


@dataclass(frozen=True, slots=True)
class Diff:
    """The changes from one program to another; falsy if there are none.

    Renamed and moved nodes compute the same as before; `str()` only counts and names them.
    """

    before: str
    after: str
    header: tuple[tuple[str, str, str], ...]
    """Program-level facts that differ: (fact, before, after)."""
    changes: tuple[TextChange, ...]
    same: int

    def __bool__(self) -> bool:
        return bool(self.header or self.changes)

    def of(self, kind: Kind) -> tuple[TextChange, ...]:
        return tuple(change for change in self.changes if change.kind == kind)

    def to_json(self) -> str:
        """A JSON document with the keys `before`, `after`, `header`, `changes` and `same`."""
        return json.dumps(asdict(self), indent=1) + "\n"

    def __str__(self) -> str:
        if not self:
            return f"no difference ({self.same} nodes)"
        return "\n".join([f"--- {self.before}", f"+++ {self.after}", *self._body(), *self._names(), self._counts()])

    def _body(self) -> Iterator[str]:
        yield from (f"! {fact}: {old} -> {new}" for fact, old, new in self.header)
        graph, follows = "", None
        for change in self.changes:
            if change.kind in ("renamed", "moved"):
                continue
            if change.graph != graph:
                graph = change.graph
                yield f"@@ graph @{graph}"
            if change.follows is not None and change.follows != follows:
                follows = change.follows
                yield f"  {follows}"
            yield from (f"{sign} {line}" for sign, line in (("-", change.before), ("+", change.after)) if line)

    def _names(self) -> Iterator[str]:
        if renamed := [f"%{c.name}" for c in self.of("renamed")]:
            yield f"renamed: {_few(renamed)}"
        if moved := [f"%{c.name}" for c in self.of("moved")]:
            yield f"moved: {_few(moved)}"

    def _counts(self) -> str:
        kinds: tuple[Kind, ...] = ("removed", "added", "changed", "renamed", "moved")
        counted = [f"{len(self.of(kind))} {kind}" for kind in kinds if self.of(kind)]
        return ", ".join([*counted, f"{self.same} the same"])


def _few(names: list[str], shown: int = 8) -> str:
    return ", ".join(names) if len(names) <= shown else f"{', '.join(names[:shown])} and {len(names) - shown} more"


def diff(before: Program, after: Program) -> Diff:
    """The changes from `before` to `after`. Origins and the log are ignored."""
    old_graphs, new_graphs = dict(before.graphs()), dict(after.graphs())
    old_constants, new_constants = Constants(before), Constants(after)
    changes: list[TextChange] = []
    same = 0
    for path in dict.fromkeys([*old_graphs, *new_graphs]):
        old = GraphLines(before, path, old_graphs.get(path, fx.Graph()), old_constants)
        new = GraphLines(after, path, new_graphs.get(path, fx.Graph()), new_constants)
        pairing = _Pairing(old, new)
        changes.extend(pairing.changes())
        same += pairing.same
    return Diff(_title(before), _title(after), tuple(_header(before, after)), tuple(changes), same)


def _title(program: Program) -> str:
    return f"{program.name} ({program.stage.label}, {sum(1 for _ in program.nodes())} nodes)"


def _header(before: Program, after: Program) -> Iterator[tuple[str, str, str]]:
    old, new = _facts(before), _facts(after)
    yield from ((fact, old[fact], new[fact]) for fact in old if old[fact] != new[fact])


def _facts(program: Program) -> dict[str, str]:
    signature = program.signature
    inputs = [repr(item.constant) if item.is_constant else str(item.type or "anything") for item in signature.inputs]
    ranges = [f"{symbol} in {low}..{'' if high is None else high}" for symbol, (low, high) in signature.ranges.items()]
    return {
        "stage": program.stage.label,
        "mode": "train" if program.training else "eval",
        "inference only": "; ".join(program.inference_only) or "no",
        "fixed mode": program.fixed_mode or "no",
        "inputs": ", ".join(inputs),
        "in_spec": write_spec(signature.in_spec),
        "out_spec": write_spec(signature.out_spec),
        "sizes": ", ".join(ranges),
    }


class _Pairing:
    """Pairs the nodes of two graphs."""

    def __init__(self, old: GraphLines, new: GraphLines) -> None:
        self.old, self.new = old, new
        self.old_nodes = [node for node in old.graph.nodes if not old.is_inline(node)]
        self.new_nodes = [node for node in new.graph.nodes if not new.is_inline(node)]
        self.index = {node: index for index, node in enumerate(self.old_nodes)}
        self.pairs: dict[fx.Node, fx.Node] = {}
        self.exact: set[fx.Node] = set()
        self.same = 0
        self._pair()

    def _pair(self) -> None:
        by_key: dict[str, deque[fx.Node]] = {}
        key_of: dict[fx.Node, str] = {}
        for node in self.old_nodes:
            key_of[node] = key = f"{node.op}{self.old.tail(node)}"
            by_key.setdefault(key, deque()).append(node)
        by_name = {node.name: node for node in self.old_nodes}
        new_names = {node.name for node in self.new_nodes}
        taken: set[fx.Node] = set()
        previous = -1
        plain = dict(self.new.refs)
        for node in self.new_nodes:
            key = f"{node.op}{self.new.tail(node)}"
            twin = by_name.get(node.name)
            partner = twin if twin is not None and twin not in taken and key_of[twin] == key else None
            partner = partner or _first_free(by_key.get(key), taken)
            if partner is not None:
                self.exact.add(node)
            elif twin is not None and twin not in taken:
                partner = twin
            else:
                partner = self._next(previous, node, new_names, taken)
            # operands print under their partner's name, or under one that no old node has
            self.new.refs[node] = f"%+{node.name}" if partner is None else f"%{partner.name}"
            if partner is not None:
                self.pairs[node] = partner
                taken.add(partner)
                previous = self.index[partner]
        self.new.refs = plain

    def _next(self, previous: int, node: fx.Node, new_names: set[str], taken: set[fx.Node]) -> fx.Node | None:
        """The old node after the last paired one, if it has the same op and its name is gone."""
        if previous + 1 >= len(self.old_nodes):
            return None
        candidate = self.old_nodes[previous + 1]
        fits = candidate.op == node.op and candidate.target == node.target
        return candidate if fits and candidate not in taken and candidate.name not in new_names else None

    def changes(self) -> Iterator[TextChange]:
        """Changes in the order of the new graph; removed nodes at their old position."""
        kept = set(self.pairs.values())
        gone = deque(node for node in self.old_nodes if node not in kept)
        stays = _longest_increasing([self.index[old] for old in self.pairs.values()])
        follows: str | None = None
        reached = -1  # position of the walk in the old graph
        for node in self.new_nodes:
            old = self.pairs.get(node)
            if old is not None:
                reached = self.index[old]
            while gone and self.index[gone[0]] <= reached + (old is None):
                reached = max(reached, self.index[gone[0]])
                yield self._removed(gone.popleft(), follows)
            change = self._change(node, old, follows, stays)
            if change is None:
                self.same += 1
                follows = self.new.line_without_origin(node)
            else:
                yield change
        yield from (self._removed(node, follows) for node in gone)

    def _removed(self, node: fx.Node, follows: str | None) -> TextChange:
        return TextChange(
            "removed", self.old.path, node.name, before=self.old.line_without_origin(node), follows=follows
        )

    def _change(self, node: fx.Node, old: fx.Node | None, follows: str | None, stays: set[int]) -> TextChange | None:
        after = self.new.line_without_origin(node)
        if old is None:
            return TextChange("added", self.new.path, node.name, after=after, follows=follows)
        kind: Kind | None = None
        if node not in self.exact:
            kind = "changed"
        elif old.name != node.name:
            kind = "renamed"
        elif self.index[old] not in stays:
            kind = "moved"
        if kind is None:
            return None
        return TextChange(kind, self.new.path, node.name, self.old.line_without_origin(old), after, follows)


def _first_free(nodes: deque[fx.Node] | None, taken: set[fx.Node]) -> fx.Node | None:
    while nodes and nodes[0] in taken:
        nodes.popleft()
    return nodes[0] if nodes else None


def _longest_increasing(values: list[int]) -> set[int]:
    """The members of one longest increasing subsequence of `values`: the nodes that did not move."""
    tails: list[int] = []
    ends: list[int] = []
    before: list[int] = []
    for position, value in enumerate(values):
        slot = bisect_left(tails, value)
        before.append(ends[slot - 1] if slot else -1)
        if slot == len(tails):
            tails.append(value)
            ends.append(position)
        else:
            tails[slot], ends[slot] = value, position
    stays: set[int] = set()
    position = ends[-1] if ends else -1
    while position >= 0:
        stays.add(values[position])
        position = before[position]
    return stays
