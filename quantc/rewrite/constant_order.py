"""Canonical order of constants (behind the inputs, by first use), and removal of unread ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from quantc.ir.program import Program, attribute


def order_constants(program: Program, graph: fx.Graph) -> Counter[str]:
    """Sort the get_attr nodes of a graph into canonical order; returns a summary of the changes."""
    done: Counter[str] = Counter()
    wanted, anchor = _merge_constants(program, graph, done)
    if anchor is None or _is_ordered(graph, wanted):
        return done
    for node in graph.find_nodes(op="placeholder"):
        anchor.prepend(node)
    for node in wanted:
        anchor.prepend(node)
    program.touch()
    done["constants moved"] += 1
    return done


def _merge_constants(program: Program, graph: fx.Graph, done: Counter[str]) -> tuple[list[fx.Node], fx.Node | None]:
    """The constants in order of first use, and the first computing node. Names of one tensor are merged."""
    owner = program.owner(graph)
    first_names = {id(tensor): name for name, tensor in [*owner.named_parameters(), *owner.named_buffers()]}
    first_use: dict[fx.Node, None] = {}
    anchor: fx.Node | None = None
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        anchor = anchor or node
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                first_use.setdefault(operand)
    leaders: dict[Any, fx.Node] = {}
    for node in first_use:
        value = attribute(owner, str(node.target))
        key = id(value) if isinstance(value, torch.Tensor | nn.Module) else node.target
        leader = leaders.setdefault(key, node)
        if leader is not node:
            program.forward(node, leader)
            done["constants merged"] += 1
        elif (name := first_names.get(id(value), str(node.target))) != node.target:
            node.target = name
            program.touch()
            done["constants renamed"] += 1
    return list(leaders.values()), anchor


def _is_ordered(graph: fx.Graph, wanted: list[fx.Node]) -> bool:
    head: list[fx.Node] = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "get_attr"):
            break
        head.append(node)
    inputs = graph.find_nodes(op="placeholder")
    return head[: len(inputs)] == list(inputs) and head[len(inputs) :] == wanted


def forget_unread(program: Program) -> None:
    """Remove constants without users, nodes and tensors, and sort the others."""
    for _, graph in program.graphs():
        for node in reversed(graph.find_nodes(op="get_attr")):
            if not node.users:
                program.erase(node)
        order_constants(program, graph)
    _forget(program)


def _forget(program: Program) -> None:
    """Remove the tensors that no graph reads: those of nested graphs too, and under all their names."""
    used: set[int] = set()
    whole: set[nn.Module] = set()
    for _, graph in program.graphs():
        owner = program.owner(graph)
        used.update(id(attribute(owner, str(node.target))) for node in graph.find_nodes(op="get_attr"))
        for node in graph.find_nodes(op="call_module"):
            whole.update(owner.get_submodule(str(node.target)).modules())  # opaque modules read their own tensors
    used.update(id(attribute(program.owner(norm.graph), target)) for norm, target in program.counters.rows.items())
    for module in program.root.modules():
        for table in (module._parameters, module._buffers) if module not in whole else ():
            for name in [name for name, tensor in table.items() if tensor is not None and id(tensor) not in used]:
                del table[name]
