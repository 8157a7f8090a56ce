"""Checks on learned scales."""

from __future__ import annotations

from quantc.errors import SpecError
from quantc.ir.decisions import Quantize
from quantc.ir.program import Program
from quantc.observe.trained import LEARNED


def refuse_learned(program: Program) -> Program:
    """The program, prepared for calibration; SpecError if a scale is to be learned, since no data can give it."""
    for group in program.plan.groups:
        if isinstance(group.outcome, Quantize) and group.outcome.spec.observe.name in LEARNED:
            raise SpecError(
                f"{group.name} is to have a learned scale ({group.outcome.spec.observe}), and nothing is trained",
                where=", ".join(map(str, group.places)),
                advice="give qc.prepare qat=True, or observe it with minmax, mse or percentile",
            )
    return program
