"""Backends that are wrong about run-time scales, weights alone, and modes; each with the row that must say so."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from quantc.annotate.quantizer import Backend
from quantc.ir.program import Program, Stage
from quantc.patterns import aten
from quantc.patterns.dsl import op
from quantc.patterns.table import Rule
from quantc.pipeline.pipeline import Pass
from quantc.qdq.ops import is_choice, is_dequantize, is_quantize
from quantc.spec.formats import Offer
from quantc.spec.spec import INT8_DYNAMIC, UINT8_TOKEN, QuantSpec
from quantc.testing import Check
from tests.support.faulty_backends import GOOD, QDQ, RUN_TIME, Faulty, plus, with_rule


class FreezeScales(Pass):
    """Scales that are said to be found as the program runs, and are not."""

    name: ClassVar[str] = "test-freeze-scales"
    needs: ClassVar[Stage] = Stage.QUANTIZED

    def run(self, program: Program) -> bool:
        found = [node for node in program.graph.nodes if is_choice(node)]
        for node in [node for node in found if "quantized_decomposed" in str(node.target)]:
            numbers = (torch.tensor([0.03], dtype=torch.float64), torch.tensor([128]))
            for item in list(node.users):
                made = program.constant("frozen", numbers[int(item.args[1])], before=node)
                item.replace_all_uses_with(made)
        program.touch()
        return True


class DoubleScales(Pass):
    """Weights that are read twice as large, where nothing else is quantized."""

    name: ClassVar[str] = "test-double-scales"
    needs: ClassVar[Stage] = Stage.QUANTIZED

    def run(self, program: Program) -> bool:
        if any(is_quantize(node) for node in program.graph.nodes):
            return False
        for node in program.graph.nodes:
            scale = program.tensor(node.args[1]) if is_dequantize(node) else None
            if scale is not None:
                scale.mul_(2)
        return True


def _with_dynamic(name: str) -> Backend:
    return with_rule(name, lambda rule: replace(rule, dynamic=Offer.YES))


def _modes(**modes: QuantSpec) -> Backend:
    return replace(GOOD, modes={name.replace("_", "-"): spec for name, spec in modes.items()})


TABLE_OF_WORDS = Rule("embedding", aten.embedding, {"w": "weight"}, supports=QDQ, dynamic=Offer.YES)

TECHNIQUES: tuple[Faulty, ...] = (
    Faulty(
        "dynamic-without-specs",
        replace(GOOD, takes=tuple(one for one in GOOD.takes if one != RUN_TIME), modes={}),
        "linear",
        Check.DYNAMIC,
        "takes no spec with run-time scales",
        ("matmul",),
    ),
    Faulty("dynamic-lookup", plus(TABLE_OF_WORDS), "embedding", Check.DYNAMIC, "reads no activation"),
    Faulty("dynamic-join", _with_dynamic("cat"), "cat", Check.DYNAMIC, "is to share a scale"),
    Faulty(
        "dynamic-follower",
        plus(Rule("wave", op("sin", args="x"), {"x": "pass", "out": "act"}, supports=QDQ, dynamic=Offer.YES)),
        "wave",
        Check.DYNAMIC,
        "reads no activation",
    ),
    Faulty(
        "named-follower",
        plus(Rule("wave", op("sin", args="x"), {"x": "pass", "out": "act"}, supports=QDQ, static=Offer.NAMED)),
        "wave",
        Check.NAMED,
        "nothing that it reads has a spec to ask for",
    ),
    Faulty(
        "dynamic-in-name",
        replace(GOOD, after=(FreezeScales(),)),
        "linear",
        Check.DYNAMIC,
        "on inputs 64 times as large",
        ("matmul",),
    ),
    Faulty(
        "weights-too-large",
        replace(GOOD, after=(DoubleScales(),)),
        "linear",
        Check.WEIGHT_ONLY,
        "the SQNR is",
        ("conv", "conv-transpose"),
    ),
    Faulty("mode-not-taken", _modes(dynamic=INT8_DYNAMIC), "", Check.MODES, "dtype must be uint8, not int8"),
    Faulty("mode-of-another-kind", _modes(weight_only=UINT8_TOKEN), "", Check.MODES, "whose timing is dynamic"),
    Faulty("mode-without-a-name", _modes(fast=UINT8_TOKEN), "", Check.MODES, "unknown mode 'fast'"),
    Faulty(
        "mode-for-nobody",
        replace(with_rule("linear", lambda rule: replace(rule, dynamic=Offer.NAMED)), modes={"dynamic": UINT8_TOKEN}),
        "",
        Check.MODES,
        "no rule comes to anything in mode 'dynamic'",
    ),
)
