"""An exported graph as a canonical Program, and the mapping of the Program's nodes back to the graph's.

Canonicalizing keeps the names of nodes, so a node of the Program maps to the exported node of that name. A node without one
(a no-op that was dropped, a transpose that became part of a linear) maps to its operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from quantc.capture.assemble import SymbolNames, assemble, inputs_of
from quantc.capture.constant_names import name_literals
from quantc.capture.export.exported import origin_from_meta
from quantc.capture.model_copies import Tensors
from quantc.flows.pt2e.export_utils import MODES
from quantc.flows.pt2e.graph_modules import copied_graph, tensor_at
from quantc.flows.pt2e.inplace_writes import drop_guards
from quantc.flows.pt2e.norms import NORMS
from quantc.flows.pt2e.quantizer import EdgeOrNode
from quantc.ir.dialect import short_name
from quantc.ir.program import Program
from quantc.ir.signature import Signature
from quantc.ir.site_index import operand_nodes
from quantc.passes.canonicalize import Canonicalize
from quantc.pipeline.pipeline import Pipeline


def program_of(module: fx.GraphModule, tensors: Tensors) -> Program:
    """The canonical Program of an exported graph, in eval mode. The graph is not changed."""
    graph = copied_graph(module.graph)
    drop_guards(graph)
    for node in graph.nodes:
        if node.op == "call_function" and (place := MODES.get(node.target, len(node.args))) < len(node.args):
            node.args = (*node.args[:place], False, *node.args[place + 1 :])
    placeholders = list(graph.find_nodes(op="placeholder"))
    in_spec, out_spec = _specs(graph)

    def signature(names: SymbolNames) -> Signature:
        leaves = [node.meta.get("val") for node in placeholders]
        return Signature(inputs_of(placeholders, leaves, names), in_spec, out_spec, {})

    program = assemble(
        graph,
        module,
        signature,
        name=type(module).__name__,
        method="export",
        is_training=False,
        origin_of=origin_from_meta,
        tensors=tensors,
    )
    Pipeline((Canonicalize(),)).run(program)
    name_literals(program)
    return program


def _specs(graph: fx.Graph) -> tuple[Any, Any]:
    codegen = graph._codegen
    if isinstance(codegen, _PyTreeCodeGen):
        return codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
    inputs = tuple(0 for _ in graph.find_nodes(op="placeholder"))
    (output,) = graph.find_nodes(op="output")
    results = pytree.tree_map_only(fx.Node, lambda _: 0, output.args[0])
    return pytree.tree_structure((inputs, {})), pytree.tree_structure(results)


@dataclass
class Correspondence:
    """A Program made of an exported graph, and that graph."""

    program: Program
    module: fx.GraphModule

    @cached_property
    def _exported_nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.module.graph.nodes}

    @cached_property
    def _canonical(self) -> set[str]:
        return {node.name for node in self.program.graph.nodes}

    def node(self, node: fx.Node) -> fx.Node | None:
        """The exported node that a node of the Program stands for; None if it is new, or in a nested graph."""
        return self._exported_nodes.get(node.name) if node.graph is self.program.graph else None

    def result(self, node: fx.Node) -> fx.Node | None:
        """The exported node whose value is that of a node of the Program: a batch norm that was folded is behind it."""
        found = self.node(node)
        while found is not None and len(found.users) == 1 and (user := next(iter(found.users))).target in NORMS:
            if user.name in self._canonical:
                break
            found = user
        return found

    def edge(self, node: fx.Node, operand: int, *, by_channel: bool) -> EdgeOrNode | None:
        """The exported edge on which a node of the Program reads an operand. A tensor with channels is taken where it
        still lies as the Program has it: before a transpose that became part of the op."""
        reader = self.node(node)
        if reader is None:
            return None
        if _same_op(node, reader):
            operands = operand_nodes(reader)
            return (operands[operand], reader) if operand < len(operands) else None
        wanted = self._source(operand_nodes(node)[operand])
        for read in operand_nodes(reader):
            path = self._path(read)
            if self._source(path[-1]) == wanted:
                return (path[-1], path[-2]) if by_channel and len(path) > 1 else (read, reader)
        return None

    def _path(self, node: fx.Node) -> list[fx.Node]:
        """From an exported node to the one that a node of the Program stands for."""
        path = [node]
        while path[-1].name not in self._canonical and path[-1].all_input_nodes:
            path.append(path[-1].all_input_nodes[0])
        return path

    def _source(self, node: fx.Node) -> object:
        """Identity of a tensor: the constant itself, or the name of its defining node."""
        if node.op != "get_attr":
            return node.name
        owner = self.program.root if node.graph is self.program.graph else self.module
        return id(tensor_at(owner, str(node.target)))


def _same_op(node: fx.Node, exported: fx.Node) -> bool:
    targets = (node.target, exported.target)
    names = [short_name(target) for target in targets if isinstance(target, torch._ops.OpOverload)]
    return len(names) == 2 and names[0] == names[1]
