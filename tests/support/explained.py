"""Backends of a few rules, and what `explain` says of a node with them."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.inspect.changes import Change
from quantc.inspect.explain import NodeExplanation
from quantc.ir.program import Program
from quantc.patterns import aten
from quantc.patterns.dsl import op
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import INT8_WEIGHT, UINT8

PRODUCT = {"x": "act", "w": "weight", "out": "act?"}
HANDED_ON = {"x": "pass", "out": "like x"}


def backend(*rules: Rule) -> Backend:
    return Backend("own", RuleTable("own", rules), roles={"act": UINT8, "weight": INT8_WEIGHT})


def conv(**where: Any) -> Any:
    return op("conv2d", args="x w b", where=where)("x", const("w"), const("b?"))


LINEAR = Rule("linear", aten.linear("x", const("w"), const("b?")), PRODUCT)
POOL = Rule("pool", aten.max_pool, HANDED_ON)
SIMPLE = backend(Rule("conv", conv(), PRODUCT), LINEAR, POOL)


def captured(model: nn.Module, *example: Tensor) -> Program:
    torch.manual_seed(0)
    return qc.capture(model.eval(), example)


def explained(
    program: Program, node: str, given: Backend, config: qc.QuantConfig | None = None, *, verdict: str = "float"
) -> NodeExplanation:
    found = qc.prepare(program, given, config=config, allow_empty=True).explain(node)
    assert found.verdict == verdict, str(found)
    return found


def smallest(explanation: NodeExplanation, kind: type[Change[Any]]) -> Any:
    change = explanation.change
    assert isinstance(change, kind), str(explanation)
    data = json.loads(explanation.to_json())
    assert data["change"] == json.loads(json.dumps(change.to_data()))
    assert str(change) in str(explanation)
    return change


class Erf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.erf(x)
