"""Nested graphs of higher-order ops: their positions among the arguments, their operands, and consistency checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch._ops import HigherOrderOperator

from quantc.ir.dialect import target_name
from quantc.ir.graph_tree import GraphTree, attribute


@dataclass(frozen=True, slots=True)
class Form:
    """The calling convention of a higher-order op: the positions of its graphs, and of the operands passed to all of
    them."""

    graphs: tuple[int, ...]
    lists: tuple[int, ...] = ()
    """The arguments that are lists of operands, in the order the graphs take them."""
    rest: int | None = None
    """The position of the first operand, if operands are separate arguments."""
    outputs_agree: bool = False

    def operands(self, args: tuple[Any, ...]) -> list[Any]:
        """The operands of a call, one for each input of its graphs."""
        if self.rest is not None:
            return list(args[self.rest :])
        return [operand for position in self.lists if position < len(args) for operand in args[position]]

    def captured(self, args: tuple[Any, ...]) -> range:
        """The range of operands that are only read: neither carried from step to step nor sliced. A call can omit
        them."""
        count = len(self.operands(args))
        if self.rest is not None:
            return range(count)
        last = self.lists[-1]
        return range(count - len(args[last]) if last < len(args) else count, count)

    def without(self, args: tuple[Any, ...], dropped: set[int]) -> tuple[Any, ...]:
        """The arguments of a call without some of its captured operands."""
        kept = [index for index in self.captured(args) if index not in dropped]
        operands = self.operands(args)
        if self.rest is not None:
            return (*args[: self.rest], *(operands[index] for index in kept))
        last = self.lists[-1]
        return (*args[:last], type(args[last])(operands[index] for index in kept), *args[last + 1 :])

    def with_more(self, args: tuple[Any, ...], more: list[fx.Node]) -> tuple[Any, ...]:
        """The arguments of a call with further operands appended."""
        if self.rest is not None:
            return (*args, *more)
        last = self.lists[-1]
        return (*args[:last], type(args[last])([*args[last], *more]), *args[last + 1 :])


FORMS: dict[str, Form] = {
    "cond": Form((1, 2), (3,), outputs_agree=True),
    "while_loop": Form((0, 1), (2, 3)),
    "map_impl": Form((0,), (1, 2)),
    "scan": Form((0,), (1, 2, 3)),
    "wrap_with_set_grad_enabled": Form((1,), rest=2),
    "wrap_with_autocast": Form((4,), rest=5),
}


def form_of(node: fx.Node) -> Form | None:
    """The calling convention of a node's op; None if it calls no graphs, or the op is unknown."""
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator) or node.kwargs:
        return None
    return FORMS.get(target_name(node.target).removeprefix("higher_order."))


def called_graphs(tree: GraphTree, node: fx.Node) -> tuple[fx.GraphModule, ...]:
    """The graphs that a call of a known op runs."""
    form = form_of(node)
    if form is None:
        return ()
    owner = tree.owner(node.graph)
    values = [node.args[position] for position in form.graphs if position < len(node.args)]
    found = [attribute(owner, str(value.target)) for value in values if isinstance(value, fx.Node)]
    return tuple(module for module in found if isinstance(module, fx.GraphModule))


def run_in_unknown_ways(tree: GraphTree) -> dict[fx.Graph, str]:
    """The nested graphs run by unknown ops, or inside such a graph, with the name of the op."""
    found: dict[fx.Graph, str] = {}
    for _, graph in tree.graphs():
        owner = tree.owner(graph)
        for node in graph.find_nodes(op="get_attr"):
            module = attribute(owner, str(node.target))
            if not isinstance(module, fx.GraphModule):
                continue
            caller = next((user for user in node.users if form_of(user) is None), None)
            if caller is not None or graph in found:
                found[module.graph] = target_name(caller.target) if caller is not None else found[graph]
    return found


def why_not_nested(node: fx.Node, target: HigherOrderOperator, owner: nn.Module) -> Iterator[str]:
    """Every mismatch between a call of a higher-order op and its graphs. Unknown ops pass."""
    op = target_name(target).removeprefix("higher_order.")
    form = form_of(node)
    if form is None:
        return
    graphs: list[tuple[str, fx.Graph]] = []
    for position in form.graphs:
        found = _graph(node.args[position], owner) if position < len(node.args) else None
        if found is None:
            yield f"argument {position} of {op} must be a nested graph"
        else:
            graphs.append(found)
    try:
        given = len(form.operands(node.args))
    except TypeError:
        yield f"the operands of {op} must be tuples"
        return
    for name, graph in graphs:
        takes = len(graph.find_nodes(op="placeholder"))
        if takes != given:
            yield f"@{name} takes {takes} inputs, but is given {given}"
    counts = {name: _outputs(graph) for name, graph in graphs}
    if form.outputs_agree and len(set(counts.values())) > 1:
        listed = ", ".join(f"@{name} gives {count}" for name, count in counts.items())
        yield f"the branches must give as many outputs: {listed}"


def _graph(value: Any, owner: nn.Module) -> tuple[str, fx.Graph] | None:
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    module = attribute(owner, str(value.target))
    return (str(value.target), module.graph) if isinstance(module, fx.GraphModule) else None


def _outputs(graph: fx.Graph) -> int:
    for node in graph.find_nodes(op="output"):
        value = node.args[0] if node.args else ()
        return len(value) if isinstance(value, tuple | list) else 1
    return 0
