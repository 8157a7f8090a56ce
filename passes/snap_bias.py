"""Rounding of biases to the accumulator's grid."""

from __future__ import annotations

from typing import ClassVar

from quantc.integer.bias_grid import snap_biases
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves


class SnapBias(Pass):
    """Round the float biases of quantized convs and linears to multiples of the accumulator's step, `sx * sw`.

    The integer form adds biases to its accumulators as integers; the Q/DQ form keeps them float. After this pass the
    Q/DQ form adds the same numbers. It matters when whole models are compared: a bias that is off by a thousandth of a
    step of the result changes some roundings, and later ops amplify them.
    """

    name: ClassVar[str] = "snap-bias"
    needs: ClassVar[Stage] = Stage.FOLDED
    before: ClassVar[Stage | None] = Stage.LOWERED
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    def run(self, program: Program) -> Outcome:
        changed = snap_biases(program)
        return Outcome(changed > 0, (f"rounded to the step of their accumulator: {changed} biases",) if changed else ())
