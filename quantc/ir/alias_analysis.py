"""Alias analysis: equivalence classes of values that may share memory, and the in-place writes that can be
functionalized.

A write `y = relu_(x)` is equivalent to `y = relu(x)` if no alias of `x` is read afterwards, other than `x` and `y`
themselves. One walk over the graph decides that for every write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from quantc.ir.dialect import argument, arguments, is_opaque, may_alias, writes
from quantc.ir.program import attribute
from quantc.ir.subgraphs import form_of


@cache
def _aliased_arguments(target: OpOverload) -> tuple[int, ...]:
    """The positions of the arguments that the result may alias; all of them if the schema does not say."""
    declared = tuple(index for index, row in enumerate(target._schema.arguments) if row.alias_info is not None)
    return declared or tuple(range(len(target._schema.arguments)))


READERS = frozenset({getattr, len, int, float, bool})
"""Python functions that query a tensor, such as its shape."""


LEAVES_INPUTS_ALONE = "_quantc_leaves_inputs_alone"
"""Attribute that marks an opaque module as not writing to any of its inputs."""


def _leaves_alone(module: Any) -> bool:
    return isinstance(module, nn.Module) and bool(module.__dict__.get(LEAVES_INPUTS_ALONE, False))


@cache
def _never_writes(target: Any) -> bool:
    return isinstance(target, OpOverload) and not writes(target) and target not in SWITCH


def operands_written(node: fx.Node, owner: nn.Module | None = None) -> list[fx.Node]:
    """The operands a node writes to (or reshapes in place). `owner` is the module that its graph's get_attr nodes refer
    into, if known."""
    if node.op in ("placeholder", "get_attr", "output") or _never_writes(node.target):
        return []
    if is_opaque(node) and not isinstance(node.target, OpOverload) and node.target not in READERS:
        if owner is not None and node.op == "call_module" and _leaves_alone(attribute(owner, str(node.target))):
            return []
        return list(node.all_input_nodes)  # opaque modules and functions may write to anything
    if isinstance(node.target, HigherOrderOperator):
        return _operands_written(node, owner)
    places = _nodes_at(node, writes(node.target))
    switch = SWITCH.get(node.target)
    if switch is not None and argument(node, switch) is not False:
        # their schemas do not say that they update the running statistics
        places += [place for name in ("mean", "var") if isinstance(place := argument(node, name), fx.Node)]
    return places


def _nodes_at(node: fx.Node, indices: Iterable[int]) -> list[fx.Node]:
    """The nodes passed to a call at some argument positions, by position or by keyword."""
    names = [row.aten_name for row in arguments(node.target)] if isinstance(node.target, OpOverload) else []
    values = [node.args[index] if index < len(node.args) else node.kwargs.get(names[index]) for index in indices]
    return [value for value in pytree.tree_leaves(values) if isinstance(value, fx.Node)]


def _operands_written(node: fx.Node, owner: nn.Module | None) -> list[fx.Node]:
    """The operands that the graphs of a higher-order op write to; all of them if that is unknown."""
    held = (
        {operand: attribute(owner, str(operand.target)) for operand in node.all_input_nodes if operand.op == "get_attr"}
        if owner is not None
        else {}
    )
    graphs = [value for value in held.values() if isinstance(value, fx.GraphModule)]
    operands = [operand for operand in node.all_input_nodes if not isinstance(held.get(operand), fx.GraphModule)]
    if not graphs:
        return operands
    insides = [(graph.graph.find_nodes(op="placeholder"), Aliasing(graph.graph, graph)) for graph in graphs]
    if not any(inside.has_writes for _, inside in insides):
        return []
    form = form_of(node)
    given = form.operands(node.args) if form is not None else []
    if any(len(inputs) != len(given) for inputs, _ in insides):
        return operands
    return [
        place
        for inputs, inside in insides
        for entry, place in zip(inputs, given, strict=True)
        if inside.is_written(entry) and isinstance(place, fx.Node)
    ]


def operands_aliased(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the result of a node may share."""
    if node.op in ("placeholder", "get_attr", "output") or not may_alias(node.target):
        return []
    if isinstance(node.target, OpOverload):
        return _nodes_at(node, _aliased_arguments(node.target))
    return list(node.all_input_nodes)


def sources_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The inputs and constants whose memory nodes may share. Two that a later op may return either of are two."""
    seen = {*nodes}
    pending = list(seen)
    while pending:
        fresh = [operand for operand in operands_aliased(pending.pop()) if operand not in seen]
        seen.update(fresh)
        pending += fresh
    return {node for node in seen if node.op in ("placeholder", "get_attr")}


SWITCH: dict[Any, str] = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}


def in_place_operand(node: fx.Node) -> fx.Node | None:
    """The one operand that a node writes to and returns, as `relu_` does."""
    places = writes(node.target)
    if len(places) != 1 or len(node.target._schema.returns) != 1:  # type: ignore[union-attr]
        return None
    given = _nodes_at(node, places)
    return given[0] if len(given) == 1 else None


def gives_shape(node: fx.Node) -> bool:
    """True if a node reshapes a tensor in place without changing its data, as `unsqueeze_` does."""
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags


@dataclass
class Aliasing:
    """Alias classes of one graph and the writes to them, as of construction.

    `seen` holds the writes that are visible through another alias, so that they must stay in place.
    """

    graph: fx.Graph
    owner: nn.Module | None = None
    """The module that get_attr nodes refer into. Without it the graphs of higher-order ops are assumed to write to all
    their operands."""
    order: dict[fx.Node, int] = field(default_factory=dict)
    seen: set[fx.Node] = field(default_factory=set)
    _parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _external: set[fx.Node] = field(default_factory=set)
    _last_write: dict[fx.Node, int] = field(default_factory=dict)
    _returned: Counter[fx.Node] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        last_use: dict[fx.Node, int] = {}
        for index, node in enumerate(self.graph.nodes):
            self.order[node] = index
            for operand in node.all_input_nodes:
                last_use[operand] = index
        tracks: dict[fx.Node, _Latest] = {}
        names: dict[fx.Node, fx.Node] = {}
        for node, index in self.order.items():
            self._join(node, tracks)
            for place in operands_written(node, self.owner):
                self._last_write[self.root(place)] = index
            target = in_place_operand(node)
            if target is not None:
                # the result is the tensor written to, under a second name
                names[node] = names.get(target, target)
                root = self.root(target)
                is_seen = root in self._external or tracks[root].latest_but(names[node]) > index
                if is_seen and not gives_shape(node):
                    self.seen.add(node)
            tracks.setdefault(self.root(node), _Latest()).add(names.get(node, node), last_use.get(node, -1))
            if node.op == "output":
                self._returned.update(self.root(operand) for operand in node.all_input_nodes)
        self._join_inputs()

    def _join_inputs(self) -> None:
        """Merge the classes of all inputs once one of them is written to: a caller may pass one tensor for two
        inputs."""
        inputs = self.graph.find_nodes(op="placeholder")
        if not any(self.is_written(node) for node in inputs):
            return
        for node in inputs[1:]:
            left, right = self.root(inputs[0]), self.root(node)
            if left is not right:
                self._returned[left] += self._returned.pop(right, 0)
                self._unite(left, right, {})

    @property
    def has_writes(self) -> bool:
        return bool(self._last_write)

    def root(self, node: fx.Node) -> fx.Node:
        """The representative of the alias class of `node`."""
        while self._parent.get(node, node) is not node:
            self._parent[node] = self._parent.get(self._parent[node], self._parent[node])
            node = self._parent[node]
        return node

    def learn(self, new: fx.Node, old: fx.Node) -> list[fx.Node]:
        """Add a node that replaces `old`, to the alias class of `old`; returns the new operands created along with
        it."""
        fresh = [operand for operand in new.all_input_nodes if operand not in self.order]
        for operand in fresh:
            self.order[operand] = self.order[old]
            self._join(operand, {})
        if new not in self.order:
            self.order[new] = self.order[old]
            self._unite(self.root(old), self.root(new), {})
        return fresh

    def merge(self, node: fx.Node, source: fx.Node) -> None:
        """Record that `node`, a copy, has been replaced by `source`: outputs that return the one return the other."""
        self._returned[self.root(source)] += self._returned[self.root(node)]

    def is_external(self, node: fx.Node) -> bool:
        """True if a node may alias an input, a parameter, a buffer or something unknown."""
        return self.root(node) in self._external

    def returned(self, node: fx.Node) -> int:
        """The number of outputs that may alias a node."""
        return self._returned[self.root(node)]

    def is_written(self, node: fx.Node) -> bool:
        """True if any write reaches the memory of `node`."""
        return self.root(node) in self._last_write

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that write, or may write, to the memory of `node`."""
        return self._writers.get(self.root(node), [])

    @cached_property
    def _writers(self) -> dict[fx.Node, list[fx.Node]]:
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            for place in operands_written(node, self.owner):
                found.setdefault(self.root(place), []).append(node)
        return found

    def is_written_after(self, node: fx.Node, moment: fx.Node) -> bool:
        return self._last_write.get(self.root(node), -1) > self.order[moment]

    def _join(self, node: fx.Node, tracks: dict[fx.Node, _Latest]) -> None:
        if node.op in ("placeholder", "get_attr"):
            self._external.add(node)
            return
        for operand in operands_aliased(node):
            self._unite(self.root(operand), self.root(node), tracks)

    def _unite(self, left: fx.Node, right: fx.Node, tracks: dict[fx.Node, _Latest]) -> None:
        if left is right:
            return
        self._parent[right] = left
        if right in self._external:
            self._external.add(left)
        if right in self._last_write:
            self._last_write[left] = max(self._last_write.pop(right), self._last_write.get(left, -1))
        if right in tracks:
            tracks.setdefault(left, _Latest()).merge(tracks.pop(right))


@dataclass
class _Latest:
    """The two members of a class with the latest last uses: answers "latest of all but this one" in constant time."""

    first: tuple[int, fx.Node | None] = (-1, None)
    second: tuple[int, fx.Node | None] = (-1, None)

    def add(self, node: fx.Node, moment: int) -> None:
        if node is self.first[1]:
            self.first = (max(moment, self.first[0]), node)
        elif moment > self.first[0]:
            self.first, self.second = (moment, node), self.first
        elif moment > self.second[0]:
            self.second = (moment, node)

    def merge(self, other: _Latest) -> None:
        for moment, node in (other.first, other.second):
            if node is not None:
                self.add(node, moment)

    def latest_but(self, node: fx.Node) -> int:
        return self.second[0] if self.first[1] is node else self.first[0]
