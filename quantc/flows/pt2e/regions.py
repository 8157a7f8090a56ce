"""Inline regions under `no_grad`, which torch.export puts into graphs of their own.

Without training such a region is no different from the graph around it, and quantizers see its ops only there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from quantc.flows.pt2e.graph_modules import store
from quantc.ir.program import attribute
from quantc.ir.subgraphs import form_of
from quantc.rewrite.inline_wrappers import GRAD_MODE


def inline_regions(module: fx.GraphModule) -> int:
    """Put the ops of `no_grad` and `enable_grad` regions in the place of their calls; how many regions there were."""
    count = 0
    pending = [node for node in module.graph.nodes if node.op == "call_function"]
    while pending:
        call = pending.pop()
        region = _region(module, call)
        if region is not None:
            pending += _inline(module, call, region)  # a region may hold another
            count += 1
    return count


def _region(module: fx.GraphModule, call: fx.Node) -> fx.GraphModule | None:
    form = form_of(call)
    if form is None or getattr(call.target, "__name__", "") != GRAD_MODE:
        return None
    held = call.args[form.graphs[0]]
    found = attribute(module, str(held.target)) if isinstance(held, fx.Node) else None
    return found if isinstance(found, fx.GraphModule) else None


def _inline(module: fx.GraphModule, call: fx.Node, region: fx.GraphModule) -> list[fx.Node]:
    """Copy what a region computes to before its call, and let that go; the nodes that were made."""
    form = form_of(call)
    operands = iter(form.operands(call.args) if form is not None else ())
    values: dict[fx.Node, Any] = {}
    made: list[fx.Node] = []
    results: Any = ()
    with call.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(operands)
            elif node.op == "output":
                results = map_arg(node.args[0], values.__getitem__)
            else:
                made.append(call.graph.node_copy(node, values.__getitem__))
                made[-1].meta = dict(node.meta)
                values[node] = made[-1]
                if node.op == "get_attr":
                    made[-1].target = _move_attribute(module, region, str(node.target))
    held = call.args[1]
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])
        call.graph.erase_node(user)
    call.graph.erase_node(call)
    if isinstance(held, fx.Node) and not held.users:
        call.graph.erase_node(held)
    return made


def _move_attribute(module: fx.GraphModule, region: fx.GraphModule, name: str) -> str:
    """Move a region's attribute into the enclosing module; return its new name."""
    value, free, number = attribute(region, name), name.replace(".", "_"), 0
    while (taken := attribute(module, free)) is not None and taken is not value:
        number += 1
        free = f"{name.replace('.', '_')}_{number}"
    if isinstance(value, torch.Tensor):
        store(module, free, value)
    else:
        setattr(module, free, value)
    return free
