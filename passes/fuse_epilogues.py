"""Fusion of activations into the kernels whose results they read."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from quantc.ir.dialect import op_name
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.targets.kernels.kernel_nodes import kernels_of, tell_kernel


class FuseEpilogues(Pass):
    """Let kernels compute the activation of their float result, where nothing else reads that.

    A kernel says itself which ops it takes in: relu for most products, and curves for convolutions on onednn.
    """

    name: ClassVar[str] = "fuse-epilogues"
    needs: ClassVar[Stage] = Stage.PLACED
    preserves: ClassVar[Preserves] = Preserves.STEPWISE

    def run(self, program: Program) -> Outcome:
        fused: Counter[str] = Counter()
        for _, graph in program.graphs():
            for node, kernel in list(kernels_of(program, graph)):
                reader = next(iter(node.users)) if len(node.users) == 1 else None
                if reader is None or reader.all_input_nodes != [node] or not kernel.absorb(op_name(reader)):
                    continue
                fused[op_name(reader)] += 1
                program.placements.stand_ins[node] = reader.name
                tell_kernel(program, node, kernel.extra_repr())
                program.forward(reader, node)
        listed = ", ".join(f"{count} {name}" for name, count in sorted(fused.items()))
        return Outcome(bool(fused), (f"fused {listed}",) if fused else ())
