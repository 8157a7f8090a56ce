"""Rules whose static form is for ops that a config names: products of two activations on x86."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.reasons import Why
from quantc.backends.x86 import X86
from quantc.errors import AnnotationError, PatternError
from quantc.ir.program import Program
from quantc.patterns.table import RuleTable
from quantc.pipeline.registry import BACKENDS
from quantc.spec.formats import Offer

SPEC = X86.outcome("act")
NAMED = ("linear-computed", "matmul", "addmm", "baddbmm")


class Products(nn.Module):
    """A layer, and a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        return y @ y.transpose(-1, -2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


def prepared(model: nn.Module, config: qc.QuantConfig | None = None, backend: Any = "x86") -> Program:
    torch.manual_seed(0)
    return qc.prepare(qc.capture(model.eval(), (torch.randn(2, 4, 8),)), backend, config=config)


def rules(program: Program) -> dict[str, str]:
    return {node.name: claim.rule for node, claim in program.plan.claims.rows.items()}


def test_on_x86_these_rules_have_to_be_named_and_no_others() -> None:
    assert tuple(rule.name for rule in X86.table if rule.static is not Offer.YES) == NAMED
    for name in ("qnnpack", "executorch"):
        assert not any(rule.static is Offer.NAMED for rule in BACKENDS[name].table)


def test_what_nobody_names_is_float_and_coverage_says_how_to_ask() -> None:
    program = prepared(Products())
    assert set(rules(program)) == {"linear"}
    row = program.coverage().row("matmul")
    assert row is not None
    assert row.why is Why.NOT_NAMED
    assert "it is static only where the config names the op" in row.reason
    assert 'config.set_op("matmul", spec) asks for it' in row.reason


class Whole(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_what_a_module_kept_whole_reads_is_float_for_that_reason(mode: str) -> None:
    program = qc.capture(nn.Sequential(nn.Linear(8, 8), Whole()).eval(), (torch.randn(2, 8),), leaf=Whole)
    config = qc.QuantConfig() if mode == "static" else qc.QuantConfig().set_all(X86.modes["dynamic"])
    row = qc.prepare(program, "x86", config=config, allow_empty=True).coverage().row("linear")
    assert row is not None
    assert "_1 is kept whole, and nothing is known of it" in row.reason


def test_the_smallest_change_is_to_name_it_and_it_helps() -> None:
    program = prepared(Products())
    explanation = program.explain("matmul")
    assert 'config.set_op("matmul", ' in str(explanation)
    for change in explanation.changes:
        assert change.on == "config"
        assert rules(prepared(Products(), change.apply(qc.QuantConfig())))["matmul"] == "matmul"


@pytest.mark.parametrize(
    "config",
    [
        qc.QuantConfig().set_op("matmul", SPEC),
        qc.QuantConfig().set_node("matmul", SPEC),
        qc.QuantConfig().set_edge("linear", "matmul", SPEC),
    ],
    ids=["op", "node", "edge"],
)
def test_naming_the_op_the_node_or_one_edge_quantizes_both_factors(config: qc.QuantConfig) -> None:
    program = prepared(Products(), config)
    assert rules(program)["matmul"] == "matmul"
    qc.calibrate(program, [(torch.randn(2, 4, 8),)])
    matmul = next(node for node in qc.convert(program).nodes() if node.name == "matmul")
    assert all("dequantize" in str(value.target) for value in matmul.all_input_nodes)


@pytest.mark.parametrize(
    "config",
    [qc.QuantConfig().set_all(SPEC), qc.QuantConfig().set(Products, SPEC)],
    ids=["everything", "module around"],
)
def test_sweeping_it_in_is_not_naming_it(config: qc.QuantConfig) -> None:
    assert "matmul" not in rules(prepared(Products(), config))


def test_a_product_that_is_float_all_the_same_has_the_reason_of_the_config() -> None:
    program = prepared(Products(), qc.QuantConfig().set_op("matmul", qc.FLOAT))
    row = program.coverage().row("matmul")
    assert row is not None
    assert row.why is Why.CONFIG


def test_a_rule_without_a_static_form_is_taken_by_run_time_scales_alone() -> None:
    def only_dynamic(rule: Any) -> Any:
        return replace(rule, static=Offer.NO) if rule.name == "linear" else rule

    table = replace(X86.table, rules=tuple(only_dynamic(rule) for rule in X86.table))
    backend = replace(X86, name="run-time", table=table.only("linear"), roles={**X86.roles})
    with pytest.raises(AnnotationError, match="it has no static form"):
        prepared(nn.Sequential(nn.Linear(8, 8)), backend=backend)
    config = qc.QuantConfig().set_all(X86.modes["dynamic"])
    assert set(rules(prepared(nn.Sequential(nn.Linear(8, 8)), config, backend))) == {"linear"}


def test_tables_say_it_in_json() -> None:
    assert RuleTable.from_json(X86.table.to_json()) == X86.table
    wrong = X86.table.only("matmul").to_json().replace('"static": "named"', '"static": "sometimes"')
    with pytest.raises(PatternError, match="sometimes"):
        RuleTable.from_json(wrong)


# -- attention ---------------------------------------------------------------------------------------------------------


def ops(program: Program) -> set[str]:
    return {row.op for row in program.coverage().rows}


def test_attention_whose_products_nobody_names_stays_whole() -> None:
    program = prepared(Attention())
    assert "sdpa" in ops(program)
    assert "matmul" not in ops(program)
    row = next(row for row in program.coverage().rows if row.op == "sdpa")
    assert row.why is Why.NOT_NAMED
    assert 'config.set_op("matmul", spec)' in row.reason
    assert 'set_op("matmul", spec)' in str(program.explain(row.node))
    note = next(entry for entry in program.log if entry.name.startswith("decompose-attention")).notes[0]
    assert "is left whole: its products are float" in note


def test_attention_whose_products_are_named_is_taken_apart() -> None:
    program = prepared(Attention(), qc.QuantConfig().set_op("matmul", SPEC))
    assert "sdpa" not in ops(program)
    assert list(rules(program).values()).count("matmul") == 2


def test_a_rule_for_other_ops_leaves_attention_whole() -> None:
    config = qc.QuantConfig().set_node("linear", qc.FLOAT).set_op("linear", SPEC)
    assert "sdpa" in ops(prepared(Attention(), config))


def test_where_products_are_taken_anyway_attention_is_taken_apart() -> None:
    assert "sdpa" not in ops(prepared(Attention(), backend="qnnpack"))


def test_the_pass_says_when_products_are_quantized() -> None:
    text = str(qc.pipelines.prepare("x86"))
    assert "decompose-attention{products=named}" in text
    assert "decompose-attention," in str(qc.pipelines.prepare("qnnpack"))
    assert qc.Pipeline.parse("decompose-attention{products=named}").passes[0].products is Offer.NAMED  # type: ignore[attr-defined]
