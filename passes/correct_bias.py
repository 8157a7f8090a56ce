"""Biases that take up the mean error of rounded weights."""

from __future__ import annotations

from typing import ClassVar

from quantc.recover.fit_rounding import corrected
from quantc.recover.fitting import FittingPass, Proposal
from quantc.recover.layers import Layer


class CorrectBias(FittingPass):
    """Correct the biases of layers by the mean change of their outputs that rounding the weights makes.

    The program keeps its float biases: the plan has the corrected ones, which `quantize` puts in their place. Where
    biases are integers on the accumulator's grid, corrections are whole steps of it. Means are enough for it:
    `qc.calibrate(..., collect="moments")`; errors are estimated then as if the inputs were independent.
    """

    name: ClassVar[str] = "correct-bias"
    statistics: ClassVar[str] = "moments"

    def propose(self, layer: Layer) -> Proposal | str:
        return corrected(layer)
