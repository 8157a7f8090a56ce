"""Weights rounded so that their layers' outputs change little."""

from __future__ import annotations

from typing import ClassVar, Literal

from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.recover.fit_rounding import Method, rounded
from quantc.recover.fitting import fit, outcome_of


class RoundWeights(Pass):
    """Round weights on their grid so that the outputs of their layers change least.

    The program keeps its float weights: the plan has the rounded ones, which `quantize` puts in their place. It takes the
    Gram matrices that `qc.calibrate(..., collect="recover")` collects: weights are fitted to those of the even batches,
    and each output keeps them only where they are better than before on the odd ones.
    """

    name: ClassVar[str] = "round"
    needs: ClassVar[Stage] = Stage.SHARED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.EXACTLY

    method: Method = "gptq"
    """How integers are found: "gptq" rounds column by column, where each takes up the errors of those before it, and then
    polishes single weights; "coordinate" polishes what there is."""
    bias: Literal["kept", "free"] = "free"
    """Whether the bias of a layer may take up the mean of the change."""

    def run(self, program: Program) -> Outcome:
        return outcome_of(fit(program, lambda layer: rounded(layer, self.method, self.bias == "free")))
