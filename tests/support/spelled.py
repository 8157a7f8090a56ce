"""Programs spelled for the delegate, and the ops in them."""

from __future__ import annotations

from quantc.ir.program import Program
from quantc.targets.executorch.legalize_xnnpack import spell


def spelled(program: Program) -> Program:
    own = program.clone()
    spell(own)
    return own


def targets(program: Program) -> list[str]:
    return [str(node.target).removeprefix("aten.").removesuffix(".default") for node in program.graph.nodes]
