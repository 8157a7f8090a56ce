"""Scales of weights fitted to what their layers read."""

from __future__ import annotations

from typing import ClassVar

from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.recover.fitting import fit, outcome_of
from quantc.recover.rescaling import rescaled


class Rescale(Pass):
    """Choose scales of weights by the error of their layers' outputs, not by that of the weights.

    Ranges from that of the weights down to a quarter of it are tried, for each set of weights that shares a scale, each
    input weighted with its mean square. It takes the Gram matrices that `qc.calibrate(..., collect="recover")` collects.
    """

    name: ClassVar[str] = "rescale"
    needs: ClassVar[Stage] = Stage.SHARED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    def run(self, program: Program) -> Outcome:
        return outcome_of(fit(program, rescaled))
