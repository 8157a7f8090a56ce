"""From nodes to sites and back, for one state of a program.

A site names an output of a node, or one of its operands: the nodes among its arguments are counted from 0 in the order
they are written, keywords last, each time they occur.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import count

from torch import fx
from torch.fx.node import map_arg

from quantc.errors import UnknownNameError, suggest
from quantc.ir.program import Program
from quantc.ir.sites import Site
from quantc.ir.types import TupleType, type_of


def operand_nodes(node: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes among a node's arguments, one for each time they occur."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return tuple(found)


def rewire(program: Program, node: fx.Node, operands: Mapping[int, fx.Node]) -> None:
    """Let a node read other nodes at some of its operands."""
    numbers = count()

    def at_next(old: fx.Node) -> fx.Node:
        return operands.get(next(numbers), old)

    node.args = map_arg(node.args, at_next)
    node.kwargs = map_arg(node.kwargs, at_next)
    program.touch()


def after(value: fx.Node) -> fx.Node:
    """The node before which what follows a tensor is put: at once, but constants where they are first read."""
    if value.op == "get_attr":
        return min(value.users)
    node = value.next
    while node.op in ("placeholder", "get_attr"):
        node = node.next
    return node


def outputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that stand for what a node yields: itself, or its items if it yields several tensors."""
    if not isinstance(type_of(node), TupleType) and not any(_is_item(user) for user in node.users):
        yield node
        return
    yield from (user for user in node.users if _is_item(user))


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


class Places:
    """The sites of a program. Made anew after the graph has changed."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.paths: dict[fx.Graph, str] = {graph: path for path, graph in program.graphs()}
        self._operands: dict[fx.Node, tuple[fx.Node, ...]] = {}

    @cached_property
    def _nodes(self) -> dict[tuple[str, str], fx.Node]:
        return {(path, node.name): node for graph, path in self.paths.items() for node in graph.nodes}

    @cached_property
    def _reads(self) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
        found: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
        for graph in self.paths:
            for node in graph.nodes:
                for operand, value in enumerate(self.operands(node)):
                    found.setdefault(value, []).append((node, operand))
        return found

    def reads(self, value: fx.Node) -> list[tuple[fx.Node, int]]:
        """Every reader of what a node yields, and at which operand."""
        return self._reads.get(value, [])

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """`operand_nodes`, once a node: one that joins thousands is asked for each of them."""
        if node not in self._operands:
            self._operands[node] = operand_nodes(node)
        return self._operands[node]

    def out(self, node: fx.Node, index: int = 0) -> Site:
        return Site(self.paths[node.graph], node.name, out=index)

    def use(self, node: fx.Node, operand: int) -> Site:
        return Site(self.paths[node.graph], node.name, operand=operand)

    def node(self, site: Site) -> fx.Node:
        """The node a site is at."""
        found = self._nodes.get((site.graph, site.node))
        if found is None:
            names = (name for path, name in self._nodes if path == site.graph)
            raise UnknownNameError(f"there is no node for {site}", advice=suggest(site.node, names, noun="nodes"))
        return found

    def value(self, site: Site) -> fx.Node:
        """The node that makes the tensor at a site: the node itself, or the one an operand refers to."""
        node = self.node(site)
        if site.operand is None:
            return node
        operands = self.operands(node)
        if site.operand >= len(operands):
            raise UnknownNameError(
                f"{site.node} has {len(operands)} operands, and {site} is none of them",
                advice="count the nodes among its arguments from 0",
            )
        return operands[site.operand]
