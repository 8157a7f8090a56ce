"""Index between nodes and sites, for one state of a program.

A site names an output of a node, or one of its operands: the nodes among its arguments, numbered from 0 in the order
they are written, keywords last, counting repetitions.
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
    """The nodes among a node's arguments, with repetitions."""
    found: list[fx.Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return tuple(found)


def rewire(program: Program, node: fx.Node, operands: Mapping[int, fx.Node]) -> None:
    """Replace some operands of a node, by operand index."""
    numbers = count()

    def at_next(old: fx.Node) -> fx.Node:
        return operands.get(next(numbers), old)

    node.args = map_arg(node.args, at_next)
    node.kwargs = map_arg(node.kwargs, at_next)
    program.touch()


def after(value: fx.Node) -> fx.Node:
    """Insertion point for a consumer of `value`: right after its definition; for constants, before the first use."""
    if value.op == "get_attr":
        return min(value.users)
    node = value.next
    while node.op in ("placeholder", "get_attr"):
        node = node.next
    return node


def outputs_of(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a node's outputs: itself, or its getitem users if it yields several tensors."""
    if not isinstance(type_of(node), TupleType) and not any(_is_item(user) for user in node.users):
        yield node
        return
    yield from (user for user in node.users if _is_item(user))


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem


class Places:
    """The site index of a program. Invalid after the graph has changed."""

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
        """Every consumer of a value, with the operand index."""
        return self._reads.get(value, [])

    def operands(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """`operand_nodes`, cached by node: a join of thousands is queried for each operand."""
        if node not in self._operands:
            self._operands[node] = operand_nodes(node)
        return self._operands[node]

    def out(self, node: fx.Node, index: int = 0) -> Site:
        return Site(self.paths[node.graph], node.name, out=index)

    def use(self, node: fx.Node, operand: int) -> Site:
        return Site(self.paths[node.graph], node.name, operand=operand)

    def node(self, site: Site) -> fx.Node:
        """The node of a site."""
        found = self._nodes.get((site.graph, site.node))
        if found is None:
            names = (name for path, name in self._nodes if path == site.graph)
            raise UnknownNameError(f"no node for {site}", advice=suggest(site.node, names, noun="nodes"))
        return found

    def value(self, site: Site) -> fx.Node:
        """The node that produces the tensor at a site: the node itself, or the operand."""
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
