"""Biases that take up the mean error of rounded weights."""

from __future__ import annotations

from typing import ClassVar

from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.recover.fit_rounding import corrected
from quantc.recover.fitting import fit, outcome_of


class CorrectBias(Pass):
    """Correct the biases of layers by the mean change of their outputs that rounding the weights makes.

    The program keeps its float biases: the plan has the corrected ones, which `quantize` puts in their place.
    """

    name: ClassVar[str] = "correct-bias"
    needs: ClassVar[Stage] = Stage.SHARED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        return outcome_of(fit(program, corrected))
