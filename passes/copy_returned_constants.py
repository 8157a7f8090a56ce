"""Results that are the caller's own."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx

from quantc.ir.dialect import may_alias
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.targets.kernels.codegen import why_not_repeated

CLONE: Any = torch.ops.aten.clone.default


class CopyReturnedConstants(Pass):
    """Copy results that would be constants, or views of them.

    A caller who writes to a result would otherwise change later calls. Buffers that a program writes to itself stay
    shared, as in the model.
    """

    name: ClassVar[str] = "copy-returned-constants"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        placements = program.placements
        if placements.owns_results or why_not_repeated(program.module) is not None:
            return Outcome(False)
        copied = 0
        output = program.graph.output_node()
        for node in [node for node in output.all_input_nodes if node in _of_constants(program.graph)]:
            made = program.emit(CLONE, (node,), before=output, like=node)
            output.replace_input_with(node, made)
            copied += 1
        placements.owns_results = True
        return Outcome(True, (f"copied {copied} constants that are results",) if copied else ())


def _of_constants(graph: fx.Graph) -> set[fx.Node]:
    """Constants, and what may be a view of one."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_part = node.op == "call_function" and may_alias(node.target) and not found.isdisjoint(node.all_input_nodes)
        if is_part or node.op == "get_attr":
            found.add(node)
    return found
