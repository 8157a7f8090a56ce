"""Removal of dropout for inference."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from quantc.ir.dialect import DROPOUTS, argument, is_op
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves


class StripDropout(Pass):
    """Remove inactive dropout: in inference it is the identity.

    Active dropout (a program in training mode, or dropout that is always on) stays. Afterwards the program is
    inference-only, because switching it to training could not bring the dropout back.
    """

    name: ClassVar[str] = "strip-dropout"
    needs: ClassVar[Stage] = Stage.CANONICAL
    before: ClassVar[Stage | None] = Stage.ANNOTATED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        found = [node for node in program.nodes() if is_op(node, *DROPOUTS) and argument(node, "train") is False]
        kept = 0
        for node in found:
            source = node.args[0]
            if not isinstance(source, fx.Node):
                kept += 1
                continue
            program.note_inference_only(f"{program.describe(node)} was removed")
            program.forward(node, source)
        removed = len(found) - kept
        return Outcome(removed > 0, (f"removed {removed} dropout",) if removed else ())
