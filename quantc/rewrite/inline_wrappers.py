"""Inlining of regions that only set a mode (`no_grad`, `autocast` switched off)."""

from __future__ import annotations

import torch
from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import Argument, map_arg

from quantc.ir.dialect import higher_order_name
from quantc.ir.program import Program, attribute
from quantc.ir.subgraphs import called_graphs, form_of

GRAD_MODE = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"
AUTOCAST_ENABLED = 2
"""The position of the argument `enabled` of an autocast region."""
GRADIENTS_LOST = "a no_grad region was inlined, so gradients would differ"


def _wrapped_graph(
    program: Program, node: fx.Node, autocast: bool
) -> tuple[fx.GraphModule, tuple[Argument, ...]] | None:
    """The graph and the operands of a `no_grad`/`enable_grad` region, or of one that switches autocast off where it is
    off anyway."""
    name = _region(node)
    form = form_of(node)
    if not name or form is None or form.rest is None:
        return None
    if name == AUTOCAST and (autocast or node.args[AUTOCAST_ENABLED] is not False):
        return None
    graphs = called_graphs(program, node)
    return (graphs[0], node.args[form.rest :]) if graphs else None


def _region(node: fx.Node) -> str:
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return ""
    name = higher_order_name(node.target)
    return name if name in (GRAD_MODE, AUTOCAST) else ""


def inline_wrappers(program: Program) -> int:
    """Inline the mode-only regions of a program that is not training; returns their number."""
    if program.training:
        return 0
    count = 0
    autocast: set[fx.Graph] = set()
    """The graphs that run, or may run, with autocast on."""
    for _, graph in program.graphs():
        pending = list(graph.nodes)
        while pending:
            node = pending.pop()
            found = _wrapped_graph(program, node, graph in autocast)
            if found is None:
                if graph in autocast or _region(node) == AUTOCAST:
                    autocast.update(module.graph for module in called_graphs(program, node))
                continue
            if _region(node) == GRAD_MODE:
                program.note_inference_only(GRADIENTS_LOST)
            pending += _inline(program, node, *found)  # a region may hold another
            count += 1
    return count


def _inline(program: Program, call: fx.Node, module: fx.GraphModule, operands: tuple[Argument, ...]) -> list[fx.Node]:
    """Replace the call of a region by its body; returns the inserted nodes."""
    values: dict[fx.Node, Argument] = {}
    inputs = iter(operands)
    made: list[fx.Node] = []
    outputs: Argument = None
    with call.graph.inserting_before(call):
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(inputs)
            elif node.op == "output":
                outputs = map_arg(node.args[0], lambda operand: values[operand])
            elif node.op == "get_attr":
                values[node] = _move_attribute(program, node, module, call)
            else:
                copied = call.graph.node_copy(node, lambda operand: values[operand])
                copied.meta = dict(node.meta)
                values[node] = copied
                made.append(copied)
                if (origin := program.origins.get(node)) is not None:
                    program.origins[copied] = origin
                if (mode := program.modes.get(node)) is not None:
                    program.modes[copied] = mode
    for user in list(call.users):
        item = outputs[user.args[1]]  # type: ignore[index]
        user.replace_all_uses_with(item)  # type: ignore[arg-type]
        program.erase(user)
    program.erase(call)
    for inner in list(module.graph.nodes):
        for table in (program.origins, program.modes, program.counters):
            table.drop(inner)
    return made


def _move_attribute(program: Program, node: fx.Node, module: fx.GraphModule, call: fx.Node) -> fx.Node:
    """The outer node for an attribute that a node in the region refers to, under a free name."""
    value = attribute(module, str(node.target))
    if isinstance(value, torch.Tensor):
        return program.constant(str(node.target), value, before=call)
    owner = program.owner(call.graph)
    name, number = str(node.target), 0
    while attribute(owner, name) not in (None, value):
        number += 1
        name = f"{node.target}_{number}"
    owner.add_module(name, value)
    return call.graph.create_node("get_attr", name)
