"""Constant evaluation: values of the nodes of an exported graph that depend on its own tensors alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx.node import map_arg

from quantc.flows.pt2e.graph_modules import tensor_at
from quantc.flows.pt2e.inplace_writes import written_operands


class Constants:
    """Values of constant nodes, each computed when it is first asked for.

    Tensors that the graph writes to are not constant, nor is what is random or made by a higher-order op; dequantize
    ops are not computed, so that weights stay quantized."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.written = _mutated_attributes(module.graph)
        self.known: dict[fx.Node, Tensor | None] = {}

    @torch.no_grad()
    def value(self, node: fx.Node) -> Tensor | None:
        """The value of a node; None if it is not constant."""
        pending = [node]
        while pending:
            top = pending[-1]
            if top in self.known:
                pending.pop()
                continue
            operands = top.all_input_nodes if _is_pure(top) else []
            missing = [operand for operand in operands if operand not in self.known]
            if missing and not any(self.known.get(operand, top) is None for operand in operands):
                pending += missing
                continue
            self.known[top] = self._compute(top, operands)
            pending.pop()
        return self.known[node]

    def _compute(self, node: fx.Node, operands: list[fx.Node]) -> Tensor | None:
        if node.op == "get_attr":
            return None if str(node.target) in self.written else tensor_at(self.module, str(node.target))
        if not operands or any(self.known.get(operand) is None for operand in operands):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), self.known.__getitem__)
        result: Any = node.target(*args, **kwargs)  # type: ignore[operator]
        return result if isinstance(result, Tensor) else None


def overload_of(target: Any) -> OpOverload | None:
    """The overload that a call of an op runs: `torch.ops.lib.op` is fine for that where it has one alone."""
    if isinstance(target, OpOverloadPacket):
        names: list[str] = target.overloads()  # type: ignore[no-untyped-call]
        return getattr(target, names[0]) if len(names) == 1 else None
    return target if isinstance(target, OpOverload) else None


def _is_pure(node: fx.Node) -> bool:
    target = overload_of(node.target) if node.op == "call_function" else None
    if target is None or target._schema.is_mutable:
        return False
    is_kept = "::dequantize_" in target._schema.name or "::convert_element_type" in target._schema.name
    return not is_kept and torch.Tag.nondeterministic_seeded not in target.tags


def _mutated_attributes(graph: fx.Graph) -> set[str]:
    """The attributes that ops of a graph write to, directly or through views."""
    found: set[str] = set()
    for node in graph.nodes:
        pending, seen = written_operands(node), set[fx.Node]()
        while pending:
            source = pending.pop()
            if source in seen:
                continue
            seen.add(source)
            if source.op == "get_attr":
                found.add(str(source.target))
            pending += source.all_input_nodes[:1] if source.op == "call_function" else []
    return found
