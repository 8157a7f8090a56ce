"""Weights rounded so that their layers' outputs change little."""

from __future__ import annotations

from typing import ClassVar, Literal

from quantc.recover.fit_rounding import Method, rounded
from quantc.recover.fitting import FittingPass, Proposal
from quantc.recover.layers import Layer


class Round(FittingPass):
    """Round weights so that the outputs of their layers change least, and find scales for that.

    The program keeps its float weights: the plan has the rounded ones, which `quantize` puts in their place. It takes the
    Gram matrices that `qc.calibrate(..., collect="recover")` collects: weights are fitted to those of the even batches,
    and each output keeps them only where they are better than before on the odd ones.
    """

    name: ClassVar[str] = "round"

    method: Method = "gptq"
    """Method: "gptq" searches scales by what errors cost in the end, rounds column by column, where each takes up
    the errors of those before it, and then polishes single weights; "coordinate" polishes what there is."""
    bias: Literal["kept", "free"] = "free"
    """True if the bias of a layer may take up the mean of the change."""

    def propose(self, layer: Layer) -> Proposal | str:
        frees_bias = self.bias == "free"
        if layer.input.width == 1 and not (frees_bias and layer.bias is not None):
            return "each of its weights meets an input of its own, and the nearest level is the best"
        return rounded(layer, self.method, frees_bias)
