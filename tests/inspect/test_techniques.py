"""Static, dynamic and weight-only side by side: coverage says which op got which, and explain what would change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import quantc as qc
from quantc.annotate.reasons import Why
from quantc.inspect.changes import AddConfigRule
from quantc.inspect.coverage import Coverage, Row
from quantc.ir.plan import Plan
from quantc.ir.program import Program
from tests.support.techniques import USES, WIDTH, attending_program, in_mode, stack


@pytest.fixture(scope="module", name="attending")
def _attending() -> Program:
    return attending_program()


SEVEN_BITS = qc.UINT8_DYNAMIC.but(qmax=127)


def by_module(coverage: Coverage) -> dict[str, Row]:
    return {row.module: row for row in coverage.rows}


# -- which op got which ----------------------------------------------------------------------------------------------


def test_every_stage_says_which_op_got_which(tmp_path: Path) -> None:
    wanted = ["static", "dynamic", "weight-only", "", "dynamic"]
    program, config, x = stack(wanted)
    prepared = qc.prepare(program, "x86", config=config)
    rows = prepared.coverage().rows
    assert [row.technique for row in rows] == wanted
    assert [row.reason for row in rows[:3]] == [
        "by linear of x86",
        "by linear of x86, dynamic",
        "by linear of x86, weight-only",
    ]
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    assert quantized.coverage().rows == rows
    quantized.save(tmp_path / "model.qc")
    assert qc.load(tmp_path / "model.qc").coverage().rows == rows

    integer = qc.convert(prepared, to="integer")
    found = integer.coverage()
    assert [row.technique for row in found.rows] == wanted
    assert [row.verdict for row in found.rows] == ["quantized", "quantized", "float", "float", "quantized"]
    stored = found.rows[2]
    assert stored.why is Why.NOT_INTEGER
    assert stored.reason == "its weight is stored quantized, and it computes in float"
    integer.save(tmp_path / "integer.qc")
    assert qc.load(tmp_path / "integer.qc").coverage().rows == found.rows


def test_totals_tables_and_json_tell_the_techniques_apart() -> None:
    program, config, _ = stack(["static", "dynamic", "weight-only", "", "dynamic"])
    coverage = qc.prepare(program, "x86", config=config).coverage()
    assert "5 ops, 4 quantized (1 static, 2 dynamic, 1 weight-only), 0 propagated, 1 float" in coverage.headline
    assert coverage.techniques == {"static": 1, "dynamic": 2, "weight-only": 1}
    lines = [line.split() for line in str(coverage).splitlines()]
    assert ["op", "quantized", "propagated", "float", "technique", "multiply-adds", "int8"] in lines
    assert ["node", "op", "technique", "module", "source", "why"] in lines
    assert any(line[:4] == ["linear_1", "linear", "dynamic", "1"] for line in lines)
    data = json.loads(coverage.to_json())
    assert data["techniques"] == coverage.techniques
    assert [row["technique"] for row in data["rows"]] == ["static", "dynamic", "weight-only", "", "dynamic"]


def test_where_all_is_static_nothing_is_told_apart() -> None:
    program, config, _ = stack(["static", "", "static"])
    coverage = qc.prepare(program, "x86", config=config).coverage()
    assert "3 ops, 2 quantized, 0 propagated, 1 float;" in coverage.headline
    assert "technique" not in str(coverage)
    assert [row.technique for row in coverage.rows] == ["static", "", "static"]


@settings(max_examples=12)
@given(st.lists(st.sampled_from(sorted(USES)), min_size=1, max_size=5))
def test_any_mix_is_told_as_it_was_asked_for(wanted: list[str]) -> None:
    """And int8 × int8 are the multiply-adds, as torch counts them, of what is static or dynamic."""
    program, config, x = stack(wanted)
    prepared = qc.prepare(program, "x86", config=config, allow_empty=True)
    qc.calibrate(prepared, [x]) if "static" in wanted else None
    with FlopCounterMode(display=False) as flops:
        torch.nn.functional.linear(x, torch.randn(WIDTH, WIDTH))
    one = flops.get_total_flops() // 2
    for coverage in (prepared.coverage(), qc.convert(prepared).coverage(), qc.convert(prepared, "integer").coverage()):
        assert [row.technique for row in coverage.rows] == wanted
        assert [row.int8_macs for row in coverage.rows] == [one * (name in ("static", "dynamic")) for name in wanted]
        assert coverage.macs == one * len(wanted)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 16, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(16, 4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.up = nn.ConvTranspose1d(4, 2, 2)

    def forward(self, tokens: Tensor) -> Any:
        y, _ = self.lstm(self.table(tokens))
        y = self.cell(y[:, -1])
        return self.up(self.conv(y[:, :, None]))


def test_multiply_adds_of_dynamic_layers_in_every_form() -> None:
    """The hidden state is float in Q/DQ form, and quantized as it comes in integer form."""
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (3, 5))
    named = qc.QuantConfig().set_op("conv1d", SEVEN_BITS).set_op("conv_transpose1d", SEVEN_BITS)
    prepared = qc.quantize(Recurrent().eval(), (tokens,), mode="dynamic", config=named).prepared
    coverage, integer = prepared.coverage(), qc.convert(prepared, to="integer").coverage()
    first, hidden, second = 4 * 16 * 8, 4 * 16 * 16, 4 * 16 * 16
    lstm, of_input = 15 * (first + second + 2 * hidden), 15 * first
    cell, cell_input = 3 * 12 * (16 + 4), 3 * 12 * 16
    conv, up = 3 * 4 * 4, 3 * 4 * 2 * 2
    in_float = by_module(coverage)
    assert [in_float[name].macs for name in ("lstm", "cell", "conv", "up")] == [lstm, cell, conv, up]
    assert [in_float[name].int8_macs for name in ("lstm", "cell", "conv", "up")] == [of_input, cell_input, conv, up]
    on_integers = by_module(integer)
    assert [on_integers[name].macs for name in ("lstm", "cell", "conv", "up")] == [lstm, cell, conv, up]
    assert [on_integers[name].int8_macs for name in ("lstm", "cell", "conv", "up")] == [lstm, cell, conv, up]
    for found in (in_float, on_integers):
        assert found["table"].technique == ""  # it reads no activation whose scale could be found
        assert {found[name].technique for name in ("lstm", "cell", "conv", "up")} == {"dynamic"}


def test_without_a_plan_the_graph_tells_the_technique() -> None:
    program, config, x = stack(["static", "dynamic", "weight-only", ""])
    config = config.set("2", qc.INT4_GROUP)
    prepared = qc.prepare(program, "x86", config=config)
    qc.calibrate(prepared, [x])
    quantized = qc.convert(prepared)
    quantized.plan = Plan()
    assert [row.technique for row in quantized.coverage().rows] == ["static", "dynamic", "weight-only", ""]


# -- why not, and what to change -------------------------------------------------------------------------------------


def test_what_reads_no_activation_has_its_weight_at_most() -> None:
    words = qc.capture(Recurrent().eval(), (torch.randint(0, 20, (3, 5)),))
    prepared, config = in_mode(words, "dynamic")
    explanation = prepared.explain("embedding")
    assert "it reads no activation, so it has no dynamic form" in explanation.reason
    change = explanation.change
    assert isinstance(change, AddConfigRule)
    again = qc.prepare(words, "x86", config=change.apply(config))
    assert again.coverage().row("embedding").technique == "weight-only"  # type: ignore[union-attr]
    static = qc.prepare(words, "x86").coverage()
    assert static.row("embedding").technique == "weight-only"  # type: ignore[union-attr]


def test_scales_by_token_where_rows_are_added_up() -> None:
    program = qc.capture(nn.Sequential(nn.Conv1d(4, 4, 3), nn.Linear(7, 5)).eval(), (torch.randn(2, 4, 9),))
    config = qc.QuantConfig().set("*", qc.UINT8_TOKEN)
    prepared = qc.prepare(program, "x86", config=config)
    assert prepared.coverage().row("linear").technique == "dynamic"  # type: ignore[union-attr]
    explanation = prepared.explain("conv1d")
    assert "which per-token gives different scales" in explanation.reason
    change = explanation.change
    assert isinstance(change, AddConfigRule)
    assert str(change) == 'config.set_node("conv1d", UINT8_DYNAMIC)'
    row = qc.prepare(program, "x86", config=change.apply(config)).coverage().row("conv1d")
    assert row is not None
    assert row.technique == "dynamic"


def test_reasons_in_mode_dynamic(attending: Program) -> None:
    coverage = in_mode(attending, "dynamic")[0].coverage()
    reasons = {row.node: row.reason for row in coverage.rows_for("float")}
    assert reasons["relu"] == "linear_1 before it is dynamic and yields float"
    assert reasons["transpose_1"] == "transpose: it hands on what is quantized, and linear is dynamic: it yields float"
    assert reasons["matmul"].startswith("matmul on x86: it is dynamic only where the config names the op,")
    assert "add has no dynamic form on x86" in reasons["add"]
    assert coverage.row("matmul").why is Why.NOT_DYNAMIC  # type: ignore[union-attr]
    on_qnnpack = in_mode(attending, "dynamic", "qnnpack")[0].coverage()
    assert on_qnnpack.row("add").reason.startswith("add has no dynamic form on qnnpack")  # type: ignore[union-attr]


def test_reasons_in_mode_weight_only(attending: Program) -> None:
    coverage = in_mode(attending, "weight-only")[0].coverage()
    reasons = {row.node: row.reason for row in coverage.rows_for("float")}
    assert reasons["relu"] == "linear_1 before it is weight-only and yields float"
    assert reasons["add"] == "linear_2 before it is weight-only and yields float"
    for node in ("transpose", "transpose_1", "transpose_2", "matmul", "matmul_1"):
        assert "it has no weight, and only weights are quantized: everything: quantize as int8" in reasons[node]
    integer = qc.convert(in_mode(attending, "weight-only")[0], to="integer").coverage()
    assert {row.node: row.reason for row in integer.rows if row.why is Why.SAID} == reasons


def test_explain_names_the_rule_of_the_config(attending: Program) -> None:
    dynamic, _ = in_mode(attending, "dynamic")
    asked = "the config asks for run-time scales: everything: quantize as uint8{timing=dynamic qmax=127"
    assert asked in str(dynamic.explain("linear"))
    assert asked in str(dynamic.explain("matmul"))
    assert "static scales come from data" in str(dynamic.explain("matmul"))
    weights, _ = in_mode(attending, "weight-only")
    found = weights.explain("linear")
    assert found.row.technique == "weight-only"
    assert "only its weights are quantized, as the config says: everything" in str(found)
    table = qc.prepare(qc.capture(nn.Embedding(8, 4).eval(), (torch.zeros(2, dtype=torch.int64),)), "x86")
    assert "it quantizes nothing but its weights" in str(table.explain("embedding"))


def test_kernels_do_not_change_what_is_told() -> None:
    program, config, x = stack(["static", "dynamic", "weight-only", ""])
    result = qc.quantize(program, None, [x], config=config)
    found = qc.lower(result.program, "x86").program.coverage()
    assert [row.technique for row in found.rows] == ["static", "dynamic", "weight-only", ""]
    assert [row.int8_macs > 0 for row in found.rows] == [True, True, False, False]
    assert found.macs == result.report.coverage.macs
