"""Store weights in the form they are quantized to."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from quantc.constants import order_constants
from quantc.pipeline import Outcome, Pass, Preserves
from quantc.program import Program, Stage, attribute
from quantc.qdq import is_quantize


class Fold(Pass):
    """Replace the quantization of a constant by the quantized constant, and forget the float one.

    After it weights are stored as int8. A float weight that something else still reads is kept.
    """

    name: ClassVar[str] = "fold"
    needs: ClassVar[Stage] = Stage.QUANTIZED
    gives: ClassVar[Stage | None] = Stage.FOLDED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    @torch.no_grad()
    def run(self, program: Program) -> Outcome:
        folded = 0
        for _, graph in program.graphs():
            here = [node for node in graph.nodes if is_quantize(node) and _is_constant(program, node)]
            for node in here:
                _fold(program, node)
            folded += len(here)
            if here:
                _drop_unread(program, graph)
                order_constants(program, graph)
        if folded:
            _forget(program)
        return Outcome(folded > 0, (f"{folded} constants quantized",) if folded else ())


def _is_constant(program: Program, node: fx.Node) -> bool:
    return all(operand.op == "get_attr" and program.tensor(operand) is not None for operand in node.all_input_nodes)


def _fold(program: Program, node: fx.Node) -> None:
    args, kwargs = map_arg((node.args, node.kwargs), program.tensor)
    levels = node.target(*args, **kwargs)  # type: ignore[operator]
    weight = node.args[0]
    hint = f"{weight.target}_quantized" if isinstance(weight, fx.Node) else node.name
    program.forward(node, program.constant(hint, levels, before=node))


def _drop_unread(program: Program, graph: fx.Graph) -> None:
    for node in reversed(graph.find_nodes(op="get_attr")):
        if not node.users:
            program.erase(node)


def _forget(program: Program) -> None:
    """Drop the constants that no graph reads any more: of a nested graph too, and under the names others had for it."""
    used: set[int] = set()
    whole: set[nn.Module] = set()
    for _, graph in program.graphs():
        owner = program.owner(graph)
        used.update(id(attribute(owner, str(node.target))) for node in graph.find_nodes(op="get_attr"))
        for node in graph.find_nodes(op="call_module"):
            whole.update(owner.get_submodule(str(node.target)).modules())  # kept opaque: it reads its own
    used.update(id(attribute(program.owner(norm.graph), target)) for norm, target in program.counters.rows.items())
    for module in program.root.modules():
        for table in (module._parameters, module._buffers) if module not in whole else ():
            for name in [name for name, tensor in table.items() if tensor is not None and id(tensor) not in used]:
                del table[name]
