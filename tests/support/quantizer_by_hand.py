"""A quantizer written by hand: it decides op by op, without a table of rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

import quantc as qc
from quantc.annotate.annotator import Annotator, Claim
from quantc.errors import AnnotationError
from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.ir.site_index import operand_nodes
from quantc.patterns.explain_match import Explanation
from quantc.patterns.table import RuleTable
from quantc.pipeline.pipeline import Pass


@dataclass(frozen=True)
class ByHand:
    """Quantizes the operands of one op; whatever else it is told to do, it does too."""

    name: str = "by-hand"
    takes: str = "linear"
    act: qc.QuantSpec = qc.INT8
    then: Callable[[Annotator, fx.Node], None] | None = None
    steps: tuple[Pass, ...] = ()
    refuses: str = ""

    def transforms(self) -> tuple[Pass, ...]:
        return self.steps

    def annotate(self, annotator: Annotator) -> None:
        for node in annotator.program.graph.nodes:
            if not is_op(node, self.takes) or node in annotator.left_out:
                continue
            annotator.claim([node], Claim(self.name, "first", node.name))
            annotator.operand(node, 0, qc.Quantize(self.act))
            if len(operand_nodes(node)) > 1:
                annotator.operand(node, 1, qc.Quantize(qc.INT8_WEIGHT))
            if self.then is not None:
                self.then(annotator, node)

    def validate(self, program: Program) -> None:
        if self.refuses:
            raise AnnotationError(self.refuses, where=str(sorted(map(str, program.plan.outcomes))))

    def supported_operators(self) -> tuple[str, ...]:
        return (self.takes,)

    def explain(self, program: Program, node: str) -> Explanation:
        return RuleTable(self.name, ()).explain(program, node)
