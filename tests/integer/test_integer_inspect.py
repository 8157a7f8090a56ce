"""The integer form as it is shown and kept: coverage, explain, text, files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.annotate.reasons import Why
from quantc.cli.app import app
from quantc.cli.inspect_summary import summarize
from quantc.errors import LoadError, QuantcError
from quantc.inspect.coverage import Verdict
from quantc.ir.program import Program, Stage
from quantc.patterns import aten
from quantc.patterns.dsl import op, optional
from quantc.patterns.operand_patterns import const
from quantc.patterns.table import Rule, RuleTable
from quantc.spec.spec import INT8_WEIGHT, UINT8
from quantc.text.digests import constants
from quantc.verbs.convert import FORMS
from tests.support.store_files import put_together, taken_apart

linear = aten.linear("x", const("w"), const("b?"))
TINY = Backend(
    "tiny-integer",
    RuleTable(
        "tiny-integer",
        (
            Rule(
                "conv",
                aten.conv("x", const("w"), const("b?")) >> optional(aten.relu),
                {"x": "act", "w": "weight", "out": "act?"},
            ),
            Rule("linear", linear >> optional(op("aten.atan.default", args="_")), {"x": "act", "w": "weight"}),
            Rule("matmul", aten.matmul, {"x": "act", "y": "act", "out": "act"}),
            Rule("pool", aten.max_pool, {"x": "pass", "out": "like x"}),
            Rule("flat", op("flatten", args="x"), {"x": "pass", "out": "like x"}),
            Rule("cumsum", op("aten.cumsum.default", args="x"), {"x": "act", "out": "act"}),
            Rule(
                "conv-transpose", aten.conv_transpose("x", const("w"), "b?"), {"x": "act", "w": "whole", "out": "act"}
            ),
        ),
    ),
    roles={"act": UINT8, "weight": INT8_WEIGHT, "whole": INT8_WEIGHT.but(granularity={"kind": "per-tensor"})},
)
"""A backend of this test's own, so that the tables of the real ones can grow."""


class Net(nn.Module):
    """Ops that become integer ops, and one for each reason to stay in float."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.pool, self.late = nn.MaxPool2d(2), nn.MaxPool2d(1)
        self.head = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Any:
        x = torch.flatten(self.pool(self.pool(self.up(torch.relu(self.conv(x))))), 1)
        x = torch.atan(self.head(x)).cumsum(1).sin()
        return self.late(x[None]) @ x.sigmoid().t()


def forms(model: nn.Module, x: Tensor) -> tuple[Program, Program, Program]:
    """The prepared program, its Q/DQ form and its integer form."""
    prepared = qc.prepare(qc.capture(model.eval(), (x,)), TINY)
    qc.calibrate(prepared, [(x,)])
    return prepared, qc.convert(prepared), qc.convert(prepared, to="integer")


@pytest.fixture(scope="module")
def example() -> Tensor:
    return torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def net(example: Tensor) -> tuple[Program, Program, Program]:
    torch.manual_seed(0)
    return forms(Net(), example)


# -- coverage --------------------------------------------------------------------------------------------------


def test_every_op_is_listed_once_and_no_step_of_another(net: tuple[Program, Program, Program]) -> None:
    coverage = net[2].coverage()
    listed = {row.node: (row.op, row.verdict.value, row.rule) for row in coverage.rows}
    assert list(listed.items()) == [
        ("conv2d", ("quantc.conv.default", "quantized", "conv")),
        ("conv_transpose2d", ("quantc.conv_transpose.default", "quantized", "conv-transpose")),
        ("max_pool2d", ("max_pool2d", "propagated", "pool")),
        ("max_pool2d_1", ("max_pool2d", "propagated", "pool")),
        ("flatten", ("flatten", "propagated", "flat")),
        ("linear", ("quantc.linear.default", "quantized", "linear")),
        ("atan", ("aten.atan.default", "float", "linear")),
        ("cumsum", ("aten.cumsum.default", "float", "cumsum")),
        ("sin", ("sin", "float", "")),
        ("unsqueeze", ("unsqueeze", "float", "")),
        ("max_pool2d_2", ("max_pool2d", "float", "")),
        ("sigmoid", ("sigmoid", "float", "")),
        ("t", ("transpose", "float", "")),
        ("matmul", ("quantc.matmul.default", "quantized", "matmul")),
    ]


def test_the_reasons_are_those_of_the_float_form_and_those_of_the_lowering(
    net: tuple[Program, Program, Program],
) -> None:
    _, qdq, integer = net
    before, after = qdq.coverage(), integer.coverage()
    why = {row.node: (row.why, row.reason) for row in after.rows_for("float")}
    assert why["cumsum"] == (Why.NOT_INTEGER, "it has no integer form")
    assert why["atan"] == (Why.NOT_INTEGER, "it is computed in float, on what linear yields")
    never = before.rows_for("float")
    assert {row.node for row in never} == set(why) - {"cumsum", "atan"}
    assert all(why[row.node] == (Why.SAID, row.reason) for row in never)


def test_multiply_adds_are_those_of_the_float_form(net: tuple[Program, Program, Program]) -> None:
    _, qdq, integer = net
    before, after = qdq.coverage(), integer.coverage()
    assert (after.macs, after.int8_macs) == (before.macs, before.int8_macs)
    assert after.macs > 0
    named = {row.node: row.macs for row in after.rows if row.macs}
    assert named == {row.node: row.macs for row in before.rows if row.macs}


def test_written_out_in_aten_it_is_covered_alike(net: tuple[Program, Program, Program]) -> None:
    prepared, _, fused = net
    written_out = qc.convert(prepared, to="integer", style="decomposed").coverage()
    expected = fused.coverage()
    assert [(row.node, row.verdict, row.rule, row.reason) for row in written_out.rows] == [
        (row.node, row.verdict, row.rule, row.reason) for row in expected.rows
    ]
    products = {"conv2d", "linear", "matmul"}  # what is written out of a transposed convolution meets inserted zeros
    counted = {row.node: (row.macs, row.int8_macs) for row in written_out.rows if row.node in products}
    assert counted == {row.node: (row.macs, row.int8_macs) for row in expected.rows if row.node in products}


def test_the_headline_says_how_many_ops_compute_on_integers(net: tuple[Program, Program, Program]) -> None:
    prepared, qdq, integer = net
    coverage = integer.coverage()
    assert "14 ops, 7 on integers (4 quantized, 3 propagated), 7 float" in coverage.headline
    assert coverage.integer_ops == json.loads(coverage.to_json())["integer_ops"] == 7
    assert prepared.coverage().integer_ops == qdq.coverage().integer_ops == 0
    assert "on integers" not in qdq.coverage().headline


def test_modules_and_lines_are_those_of_the_op_a_match_began_with(net: tuple[Program, Program, Program]) -> None:
    _, qdq, integer = net
    for name in ("conv2d", "linear", "max_pool2d"):
        left, right = qdq.coverage().row(name), integer.coverage().row(name)
        assert left is not None
        assert right is not None
        assert (right.module, right.source) == (left.module, left.source)
        assert right.module


def test_the_coverage_of_a_program_without_float_ops_is_all_integers() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), torch.randn(2, 1, 2, 2)
    coverage = forms(model, x)[2].coverage()
    assert coverage.counts == {"quantized": 2, "propagated": 1, "float": 0}


# -- explain ---------------------------------------------------------------------------------------------------


def test_explain_tells_what_an_integer_op_computes(net: tuple[Program, Program, Program]) -> None:
    _, qdq, integer = net
    found = integer.explain("conv2d")
    assert found.verdict is Verdict.QUANTIZED
    assert found.reason == "on integers, by conv of tiny-integer"
    name = integer.plan.lowered[integer.node("conv2d")]
    assert str(qdq.node(name).target) == "quantized_decomposed.quantize_per_tensor.default"
    assert found.notes[0] == f"it has the value of {name} of the Q/DQ form"
    assert "acc = Σ (xq − xz)(wq − wz)" in str(found)
    assert json.loads(found.to_json())["notes"] == list(found.notes)


def test_explain_of_a_float_op_refers_to_the_prepared_program(net: tuple[Program, Program, Program]) -> None:
    prepared, _, integer = net
    found = integer.explain("sin")
    assert found.verdict is Verdict.FLOAT
    assert "prepared.explain('sin')" in str(found)
    assert prepared.explain("sin").changes
    assert "no change" not in str(found)


def test_a_step_has_no_explanation_of_its_own(net: tuple[Program, Program, Program]) -> None:
    steps = [node for node in net[2].graph.nodes if str(node.target) == "aten.round.default"]
    with pytest.raises(QuantcError, match="only ops that compute tensors"):
        net[2].explain(steps[0].name)


# -- compare, inspect ------------------------------------------------------------------------------------------


def test_compare_measures_the_outputs_and_the_ops_in_float(
    net: tuple[Program, Program, Program], example: Tensor
) -> None:
    prepared, qdq, integer = net
    left, right = qc.compare(prepared, qdq, [example]), qc.compare(prepared, integer, [example])
    assert abs(left.sqnr - right.sqnr) < 6
    assert {layer.node for layer in right.layers} == {row.node for row in integer.coverage().rows_for("float")}
    assert any("qc.agreement" in note for note in right.notes)
    assert not any("no counterpart" in note for note in right.notes)


def test_a_summary_counts_integer_ops(net: tuple[Program, Program, Program]) -> None:
    kinds = {row.op: row.kind for row in summarize(net[2]).ops}
    assert kinds["quantc.conv.default"] == kinds["quantc.matmul.default"] == "integer"
    assert kinds["max_pool2d"] == "canonical"
    assert summarize(net[2]).opaque == ()


# -- text and files --------------------------------------------------------------------------------------------

FRESH = """
import sys, torch, quantc as qc
program = qc.load(sys.argv[1])
inputs = torch.load(sys.argv[2])
torch.save((program(inputs["x"]), program.dump()), sys.argv[3])
"""


@pytest.mark.parametrize("style", ["fused", "decomposed"])
@pytest.mark.parametrize("multiplier", ["float64", "fixed"])
def test_a_file_gives_the_same_program_back(
    net: tuple[Program, Program, Program], example: Tensor, tmp_path: Path, style: Any, multiplier: Any
) -> None:
    integer = qc.convert(net[0], to="integer", style=style, multiplier=multiplier)
    integer.save(tmp_path / "net.qc")
    loaded = qc.load(tmp_path / "net.qc")
    assert torch.equal(loaded(example), integer(example))
    assert loaded.stage is Stage.LOWERED
    assert loaded.dump() == integer.dump()
    assert {node.name: name for node, name in loaded.plan.lowered.rows.items()} == {
        node.name: name for node, name in integer.plan.lowered.rows.items()
    }
    assert loaded.coverage().to_data()["rows"] == integer.coverage().to_data()["rows"]


def test_a_file_reads_in_a_process_that_knows_nothing_of_it(
    net: tuple[Program, Program, Program], example: Tensor, tmp_path: Path
) -> None:
    integer = net[2]
    integer.save(tmp_path / "net.qc")
    torch.save({"x": example}, tmp_path / "inputs.pt")
    args = [str(tmp_path / name) for name in ("net.qc", "inputs.pt", "found.pt")]
    subprocess.run([sys.executable, "-c", FRESH, *args], check=True)
    found, text = torch.load(tmp_path / "found.pt")
    assert torch.equal(found, integer(example))
    assert text == integer.dump()


def test_a_node_that_a_file_names_and_does_not_have_is_refused(
    net: tuple[Program, Program, Program], tmp_path: Path
) -> None:
    path = tmp_path / "net.qc"
    net[2].save(path)
    document, tensors = taken_apart(path)
    document["plan"]["lowered"]["nobody"] = "quantize_per_tensor"
    put_together(path, document, tensors)
    with pytest.raises(LoadError, match="unknown node 'nobody'") as caught:
        qc.load(path)
    assert str(caught.value.where).endswith("plan.lowered")


def test_text_gives_the_same_program_back(net: tuple[Program, Program, Program], example: Tensor) -> None:
    integer = net[2]
    parsed = qc.parse(integer.dump(), constants(integer))
    assert parsed.dump() == integer.dump()
    assert torch.equal(parsed(example), integer(example))
    parsed.verify()


# -- one call --------------------------------------------------------------------------------------------------


def test_quantize_gives_the_integer_form_if_asked(example: Tensor) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)).eval()
    qdq, integer = (qc.quantize(model, (example,), [example], TINY, to=form) for form in FORMS)
    assert (qdq.program.stage, integer.program.stage) == (Stage.FOLDED, Stage.LOWERED)
    assert integer.report.coverage.integer_ops == 4
    assert (qdq.report.form, integer.report.to_data()["form"]) == ("qdq", "integer")
    assert str(integer.report).splitlines()[0] == "Sequential, quantized for tiny-integer, in integer form"
    assert str(qdq.report).splitlines()[0] == "Sequential, quantized for tiny-integer"
    assert integer.report.comparison is not None
    assert qdq.report.comparison is not None
    assert [layer.local for layer in integer.report.comparison.layers] == [
        layer.local for layer in qdq.report.comparison.layers
    ]
    assert torch.equal(integer(example), integer.program(example))


def test_a_form_there_is_not_is_refused_before_anything_is_run() -> None:
    with pytest.raises(QuantcError, match="unknown form 'interger'") as caught:
        qc.quantize(nn.Linear(2, 2), (torch.randn(1, 2),), [torch.randn(1, 2)], to="interger")  # type: ignore[arg-type]
    assert "did you mean integer?" in str(caught.value.advice)


def test_the_command_line_writes_the_integer_form(tmp_path: Path) -> None:
    out = tmp_path / "digits.qc"
    arguments = ["quantize", "--to", "integer", "--backend", "qnnpack", "--json", "--out", str(out)]
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["form"] == "integer"
    assert told["coverage"]["stage"] == "lowered"
    assert told["coverage"]["integer_ops"] == told["coverage"]["counts"]["quantized"] + 1
    assert told["accuracy"]["after"] > 0.98
    assert qc.load(out).stage is Stage.LOWERED
