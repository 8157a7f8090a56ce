"""Writes in place in an exported graph, which training IR keeps: `relu_`, `copy_`, `out=`.

An observer becomes a quantize op, which copies. So a tensor that changes after its definition is observed right before each
reader, with its contents at that point, and writes that others see go to the tensor itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import Argument
from torch.utils import _pytree as pytree

from quantc.flows.pt2e.graph_modules import copied_graph
from quantc.ir.alias_analysis import Aliasing, in_place_operand, operands_written
from quantc.ir.dialect import may_alias, writes

GUARDS = "_guards_fn"
"""The module that checks inputs: it is called in the graph, reads them, and yields nothing."""


def drop_guards(graph: fx.Graph) -> None:
    """Erase the checks of inputs."""
    for node in reversed(graph.nodes):
        if node.op == "call_module" and node.target == GUARDS and not node.users:
            graph.erase_node(node)


def may_write(graph: fx.Graph) -> bool:
    """True if an op of a graph writes, or calls another graph, which may write."""
    return any(
        isinstance(node.target, HigherOrderOperator) or bool(writes(node.target))
        for node in graph.nodes
        if node.op == "call_function"
    )


def name_results(graph: fx.Graph) -> int:
    """Let what reads a tensor after a write read the result of the write, which is the same memory; how many did not.

    `y.relu_(); return y` becomes `z = y.relu_(); return z`: who takes a graph for functional is right about it."""
    count = 0
    if not may_write(graph):
        return count
    latest: dict[fx.Node, fx.Node] = {}
    """The last name of a tensor, by each name it had."""
    names: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if (name := latest.get(operand)) is not None:
                node.replace_input_with(operand, name)
                count += 1
        target = _result_operand(node)
        if target is not None:
            names[node] = [*names.pop(target, []), target]
            for name in names[node]:
                latest[name] = node
    return count


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands an ATen call writes to, given by position or, as `out=`, by name."""
    places = writes(node.target) if node.op == "call_function" else ()
    given = _by_position(node) if places else ()
    return [
        operand for operand in pytree.tree_leaves([given[place] for place in places]) if isinstance(operand, fx.Node)
    ]


def _result_operand(node: fx.Node) -> fx.Node | None:
    """The operand that a node writes to and returns, if there is one alone."""
    operands = written_operands(node)
    if len(operands) != 1 or len(node.target._schema.returns) != 1:  # type: ignore[union-attr]
        return None
    return operands[0]


def _by_position(node: fx.Node) -> tuple[Argument, ...]:
    """The arguments of an ATen call, those given by name too; None where one is left out."""
    rows = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((row.name for row in rows), node.args, strict=False)) | dict(node.kwargs)
    return tuple(given.get(row.name) for row in rows)


@dataclass
class Writes:
    """Mutation analysis: the tensors of a graph that change after their definition, as the graph stands at construction."""

    changing: set[fx.Node] = field(default_factory=set)
    """Tensors that are written to later on."""
    kept: dict[fx.Node, set[fx.Node]] = field(default_factory=dict)
    """For each node that writes, what it must be given itself, since others see the write."""

    def is_kept(self, node: fx.Node, operand: fx.Node) -> bool:
        """True if a node must read the tensor itself, not a copy: it writes to it, or yields a view of a tensor that changes."""
        if operand in self.kept.get(node, ()):
            return True
        is_view = may_alias(node.target) and not writes(node.target) and node.op == "call_function"
        return operand in self.changing and is_view


def writes_of(module: fx.GraphModule) -> Writes:
    """The writes of a graph. Nothing is looked for where no op writes."""
    if not may_write(module.graph):
        return Writes()
    graph = copied_graph(module.graph)
    drop_guards(graph)
    for node in graph.nodes:
        if node.op == "call_function" and writes(node.target):
            node.args, node.kwargs = _by_position(node), {}  # it is looked at, and not run
    aliasing = Aliasing(graph, module)
    if not aliasing.has_writes:
        return Writes()
    nodes = {node.name: node for node in module.graph.nodes}
    found = Writes({nodes[node.name] for node in graph.nodes if aliasing.is_written_after(node, node)})
    for node in graph.nodes:
        is_seen = node in aliasing.seen or in_place_operand(node) is None
        kept = {nodes[operand.name] for operand in operands_written(node, module)} if is_seen else set()
        if kept:
            found.kept[nodes[node.name]] = kept
    return found
