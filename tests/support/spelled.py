"""Programs spelled for the delegate, and the ops in them."""

from __future__ import annotations

from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pipeline

LEGALIZE = Pipeline.parse("legalize-xnnpack,legalize-slices,legalize-bmm,legalize-weights,unroll-recurrent")


def spelled(program: Program) -> Program:
    """A copy of a program, legalized; what each pass says of itself is checked."""
    return LEGALIZE.run_on_copy(program, [Truth(), Verify(), Guard()])


def targets(program: Program) -> list[str]:
    return [str(node.target).removeprefix("aten.").removesuffix(".default") for node in program.graph.nodes]
