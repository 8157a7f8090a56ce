"""Biases that take up the mean error of rounded weights."""

from __future__ import annotations

from typing import ClassVar

from quantc.recover.fit_rounding import corrected
from quantc.recover.fitting import FittingPass, Proposal
from quantc.recover.layers import Layer


class CorrectBias(FittingPass):
    """Correct the biases of layers by the mean change of their outputs that rounding the weights makes.

    The program keeps its float biases: the plan has the corrected ones, which `quantize` puts in their place.
    """

    name: ClassVar[str] = "correct-bias"

    def propose(self, layer: Layer) -> Proposal | str:
        return corrected(layer)
