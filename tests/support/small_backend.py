"""A backend of a few rules for tests that must not change when the real tables grow."""

from __future__ import annotations

from dataclasses import replace

from quantc.annotate.quantizer import Backend
from quantc.ir.decisions import Fixed
from quantc.patterns import aten
from quantc.patterns.dsl import optional
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import DType
from quantc.spec.spec import INT8_WEIGHT, UINT8

SMALL = Backend(
    "small",
    RuleTable(
        "small",
        (
            Rule(
                "conv-relu",
                aten.conv("x", const("w"), const("b?")) >> optional(aten.relu),
                {"x": "act", "w": "weight", "out": "act?"},
            ),
            Rule("linear", aten.linear("x", const("w"), const("b?")), {"x": "act", "w": "weight", "out": "act"}),
            Rule("add", aten.add, {"x": "act", "y": "act", "out": "act"}),
            Rule("cat", aten.cat, {"xs": "act", "out": "like xs"}),
            Rule("max-pool", aten.max_pool, {"x": "pass", "out": "like x"}),
            Rule("reshape", aten.reshape, {"x": "pass", "out": "like x"}),
            Rule("sigmoid", aten.sigmoid, {"x": "act", "out": "unit"}),
        ),
    ),
    roles={"act": UINT8, "weight": INT8_WEIGHT, "unit": Fixed(1 / 256, 0, UINT8)},
    summary="a few rules, for tests",
)

SMALL4 = replace(
    SMALL,
    name="small4",
    roles={**SMALL.roles, "weight": INT8_WEIGHT.but(dtype=DType.INT4)},
    summary="weights of 4 bits",
)

for each in (SMALL, SMALL4):
    BACKENDS.register(each.name, each)
