"""A backend of products alone whose roles are handed in, the one of the bias too."""

from __future__ import annotations

from quantc.annotate.quantizer import Backend
from quantc.patterns import aten
from quantc.patterns.dsl import optional
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import UINT8, QuantSpec


def backend(**roles: QuantSpec) -> Backend:
    given = {"x": "act", "w": "weight", "out": "act", **({"b": "bias"} if "bias" in roles else {})}
    rules = (
        Rule("linear", aten.linear("x", const("w"), const("b?")) >> optional(aten.relu), given),
        Rule("conv", aten.conv("x", const("w"), const("b?")), given),
        Rule("conv-transpose", aten.conv_transpose("x", const("w"), const("b?")), given),
    )
    return Backend("biased", RuleTable("biased", rules), roles={"act": UINT8, **roles}, summary="for tests")
