"""Folding of weight quantization into stored integers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import fx
from torch.fx.node import map_arg

from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq.ops import is_quantize
from quantc.rewrite.constant_order import forget_unread


class Fold(Pass):
    """Replace the quantize op of a constant by the quantized constant, and drop the float one.

    Afterwards weights are stored as int8. A float weight with other users is kept.
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
        if folded:
            forget_unread(program)
        return Outcome(folded > 0, (f"{folded} constants quantized",) if folded else ())


def _is_constant(program: Program, node: fx.Node) -> bool:
    return all(operand.op == "get_attr" and program.tensor(operand) is not None for operand in node.all_input_nodes)


def _fold(program: Program, node: fx.Node) -> None:
    args, kwargs = map_arg((node.args, node.kwargs), program.tensor)
    levels = node.target(*args, **kwargs)  # type: ignore[operator]
    weight = node.args[0]
    hint = f"{weight.target}_quantized" if isinstance(weight, fx.Node) else node.name
    program.forward(node, program.constant(hint, levels, before=node))
