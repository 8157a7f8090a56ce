"""Which values may share memory, and which writes in place can become functional.

A write `y = relu_(x)` is the same as `y = relu(x)` if nothing that shares memory with `x` is read afterwards, other
than through `x` and `y` themselves. One walk over the graph decides that for every write.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import fx
from torch._ops import OpOverload

from quantc.dialect import may_alias, writes


@cache
def _aliased_arguments(target: OpOverload) -> tuple[int, ...]:
    """The positions of the arguments whose memory the result may share; the first where the schema does not say."""
    declared = tuple(index for index, row in enumerate(target._schema.arguments) if row.alias_info is not None)
    return declared or (0,)


@dataclass
class Aliasing:
    """Memory classes of one graph, as it stands when this is made.

    `kept` holds the writes that must stay in place. Positions are those at the time of the analysis.
    """

    graph: fx.Graph
    order: dict[fx.Node, int] = field(default_factory=dict)
    kept: set[fx.Node] = field(default_factory=set)
    _parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _external: set[fx.Node] = field(default_factory=set)
    _last_kept_write: dict[fx.Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        last_use: dict[fx.Node, int] = {}
        for index, node in enumerate(self.graph.nodes):
            self.order[node] = index
            for operand in node.all_input_nodes:
                last_use[operand] = index
        tracks: dict[fx.Node, _Latest] = {}
        for node, index in self.order.items():
            self._join(node, tracks)
            written = self.written(node)
            if written is None:
                self._track(node, tracks, last_use)
                continue
            root = self.root(written)
            if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
                self._track(node, tracks, last_use)
                continue
            if root in self._external or tracks[root].latest_but(written) > index:
                self.kept.add(node)
                self._last_kept_write[root] = index
            self._track(node, tracks, last_use)

    def root(self, node: fx.Node) -> fx.Node:
        """The representative of the class of values that may share memory with `node`."""
        while self._parent.get(node, node) is not node:
            self._parent[node] = self._parent.get(self._parent[node], self._parent[node])
            node = self._parent[node]
        return node

    def keep(self, node: fx.Node) -> None:
        """Say that a write stays in place after all."""
        written = self.written(node)
        if written is not None:
            self.kept.add(node)
            root = self.root(written)
            self._last_kept_write[root] = max(self._last_kept_write.get(root, -1), self.order.get(node, -1))

    @staticmethod
    def written(node: fx.Node) -> fx.Node | None:
        """The operand a node writes to (or gives another shape), if it does."""
        for index in writes(node.target):
            operand = node.args[index] if index < len(node.args) else None
            if isinstance(operand, fx.Node):
                return operand
        return None

    def is_external(self, node: fx.Node) -> bool:
        """Whether a node may share memory with an input, a parameter, a buffer or something unknown."""
        return self.root(node) in self._external

    def is_written(self, node: fx.Node) -> bool:
        """Whether any write that stays in place reaches the memory of `node`."""
        return self.root(node) in self._last_kept_write

    def is_written_after(self, node: fx.Node, moment: fx.Node) -> bool:
        return self._last_kept_write.get(self.root(node), -1) > self.order.get(moment, -1)

    def _join(self, node: fx.Node, tracks: dict[fx.Node, _Latest]) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._external.add(node)
            return
        if node.op == "output" or not may_alias(node.target):
            return
        if isinstance(node.target, OpOverload):
            sources = [node.args[index] for index in _aliased_arguments(node.target) if index < len(node.args)]
            operands = [source for source in sources if isinstance(source, fx.Node)]
        else:
            operands = list(node.all_input_nodes)
        for operand in operands:
            self._unite(self.root(operand), self.root(node), tracks)

    def _unite(self, left: fx.Node, right: fx.Node, tracks: dict[fx.Node, _Latest]) -> None:
        if left is right:
            return
        self._parent[right] = left
        if right in self._external:
            self._external.add(left)
        if right in self._last_kept_write:
            self._last_kept_write[left] = max(self._last_kept_write[right], self._last_kept_write.get(left, -1))
        if right in tracks:
            tracks.setdefault(left, _Latest()).merge(tracks.pop(right))

    def _track(self, node: fx.Node, tracks: dict[fx.Node, _Latest], last_use: dict[fx.Node, int]) -> None:
        tracks.setdefault(self.root(node), _Latest()).add(node, last_use.get(node, -1))


@dataclass
class _Latest:
    """The two members of a class that are used last, so "all but this one" is answered without a walk."""

    first: tuple[int, fx.Node | None] = (-1, None)
    second: tuple[int, fx.Node | None] = (-1, None)

    def add(self, node: fx.Node, moment: int) -> None:
        if moment > self.first[0]:
            self.first, self.second = (moment, node), self.first
        elif moment > self.second[0]:
            self.second = (moment, node)

    def merge(self, other: _Latest) -> None:
        for moment, node in (other.first, other.second):
            if node is not None:
                self.add(node, moment)

    def latest_but(self, node: fx.Node) -> int:
        return self.second[0] if self.first[1] is node else self.first[0]
