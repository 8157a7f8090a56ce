"""Quantizers written by hand, small tables, and a program for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

import quantc as qc
from quantc.annotate.annotator import Annotator, Claim
from quantc.errors import AnnotationError
from quantc.ir.dialect import is_op
from quantc.ir.program import Program
from quantc.ir.site_index import operand_nodes
from quantc.passes.annotate import Annotate
from quantc.patterns import aten
from quantc.patterns.explain_match import Explanation
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
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


BY_HAND = ByHand()


def table(name: str, *rules: Rule, act: qc.QuantSpec = qc.UINT8) -> qc.Backend:
    used = {role for rule in rules for role in rule.roles.values()}
    roles = {"act": act, **({"weight": qc.INT8_WEIGHT} if "weight" in used else {})}
    return qc.Backend(name, RuleTable(name, rules), roles=roles)


LINEAR = Rule("linear", aten.linear("x", const("w")), {"x": "act", "w": "weight", "out": "act"})
TANH = Rule("tanh", aten.tanh, {"x": "act", "out": "act"})


def two_linears() -> tuple[nn.Module, Program, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)).eval()
    batches = [torch.randn(16, 8) for _ in range(4)]
    return model, qc.capture(model, (batches[0],)), batches


def claimed(prepared: Program) -> dict[str, str]:
    return {node.name: f"{claim.quantizer}/{claim.rule}" for node, claim in prepared.plan.claims.rows.items()}


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def prepared(backend: Any = "x86", **how: Any) -> Program:
    return qc.prepare(qc.capture(linears(), (X,)), backend, **how)


class Deaf(ByHand):
    """A quantizer that does not look at what the config leaves out."""

    def annotate(self, annotator: Any) -> None:
        for node in annotator.program.graph.nodes:
            if is_op(node, "linear"):
                annotator.claim([node], Claim(self.name, "first", node.name))
                annotator.operand(node, 0, qc.Quantize(self.act))
                annotator.operand(node, 1, qc.Quantize(qc.INT8_WEIGHT))
                annotator.output(node, qc.Quantize(self.act))


def annotated(program: Program, quantizer: Any, config: qc.QuantConfig | None = None) -> Program:
    """The program itself, with the decisions of a quantizer in its plan."""
    Annotate(backend=quantizer, config=config or qc.QuantConfig(), allow_empty=True).run(program)
    return program


def decisions(program: Program) -> dict[str, str]:
    """What was decided, by place."""
    return {str(site): str(outcome) for site, outcome in program.plan.outcomes.items()}
