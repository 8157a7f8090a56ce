"""Where constants stand in a graph: behind the inputs, in order of first use, one node for each tensor."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from quantc.program import Program, attribute


def order_constants(program: Program, graph: fx.Graph) -> Counter[str]:
    """Bring the get_attr nodes of a graph into that order; says what was done."""
    done: Counter[str] = Counter()
    wanted, anchor = _merged(program, graph, done)
    if anchor is None or _is_ordered(graph, wanted):
        return done
    for node in graph.find_nodes(op="placeholder"):
        anchor.prepend(node)
    for node in wanted:
        anchor.prepend(node)
    program.touch()
    done["constants moved"] += 1
    return done


def _merged(program: Program, graph: fx.Graph, done: Counter[str]) -> tuple[list[fx.Node], fx.Node | None]:
    """The constants in order of first use, and the first node that computes. Names of one tensor become one."""
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
