"""The proof on whole programs, and ranges that are made narrower where it asks for it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import quantc as qc
from quantc.backends.x86 import X86
from quantc.cli.app import app
from quantc.errors import PipelineError, QuantcError, UnknownNameError
from quantc.integer.proof.overflow_report import Accumulators, Safety, accumulators
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.decisions import Fixed
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pipeline
from quantc.pipeline.registry import BACKENDS
from quantc.qdq.ops import is_dequantize
from quantc.spec.capability import Capability
from quantc.spec.spec import INT8_NARROW_WEIGHT, UINT8


class Net(nn.Module):
    """One of each kind of product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, groups=8, bias=False)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.up_grouped = nn.ConvTranspose2d(4, 4, 2, groups=2)
        self.matrix = nn.Parameter(torch.randn(13, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.depthwise(torch.relu(self.conv(x))))
        x = self.up_grouped(self.up(x)) @ self.matrix
        return torch.as_tensor(self.head(x @ x.transpose(-1, -2) @ x))


@pytest.fixture(scope="module")
def prepared() -> Program:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    named = qc.QuantConfig().set_op("matmul", X86.outcome("act"))
    found = qc.prepare(qc.capture(Net().eval(), (x,)), "x86", config=named)
    qc.calibrate(found, [(x,)])
    return found


def proof(program: Program) -> Accumulators:
    return accumulators(program)


# -- the report --------------------------------------------------------------------------------------------------------


def test_every_product_has_a_row(prepared: Program) -> None:
    found = proof(qc.convert(prepared, reduce_range="no"))
    kinds = [row.op for row in found.rows]
    assert kinds == [
        *("conv2d", "conv2d", "conv_transpose2d", "conv_transpose2d", "matmul", "matmul", "matmul", "linear")
    ]
    assert [row.channels for row in found.rows] == [8, 8, 4, 4, 6, 1, 1, 5]
    assert [row.module for row in found.rows][:4] == ["conv", "depthwise", "up", "up_grouped"]
    assert {row.instruction_set for row in found.rows} == {"avx2"}
    assert found.rows[0].saturates_on == ("avx2", "avx512")
    assert f"{len(found.rows)} products of integers" in str(found)


def test_bounds_are_those_of_the_weights_in_the_program(prepared: Program) -> None:
    """Against Python integers, from the constants of the program."""
    program = qc.convert(prepared)
    node = next(node for node in program.nodes() if op_name(node) == "linear")
    x, w, b = (argument(node, name) for name in "xwb")
    levels, scales, bias = (program.tensor(value) for value in (w.args[0], w.args[1], b))
    assert levels is not None
    assert scales is not None
    assert bias is not None
    scale, zero_point = x.args[1], x.args[2]
    highest, pair = [], []
    for row, step, addend in zip(levels.tolist(), scales.tolist(), bias.tolist(), strict=True):
        total = sum(max(0, *(value * (q - zero_point) for q in (0, 255))) for value in row)
        highest.append(max(total, total + round(addend / (scale * step))))
        pair.append(max(255 * (max(a, 0) + max(c, 0)) for a, c in zip(row[::2], row[1::2], strict=True)))
    found = proof(program).row(node.name)
    assert found is not None
    assert found.pair is not None
    assert (found.high, found.pair.high) == (max(highest), max(pair))


def test_the_integer_form_has_the_same_bounds(prepared: Program) -> None:
    for what in get_args(RangeReduction):
        qdq = proof(qc.convert(prepared, reduce_range=what))
        integer = proof(qc.convert(prepared, to="integer", reduce_range=what))
        assert [row.pairs for row in integer.rows] == [row.pairs for row in qdq.rows]
        assert [(row.low, row.high) for row in integer.rows] == [(row.low, row.high) for row in qdq.rows]
        assert [row.instruction_set for row in integer.rows] == ["avx2"] * len(qdq.rows)


def test_one_weight_a_sum_is_safe() -> None:
    x = torch.randn(2, 4, 5, 5)
    program = qc.prepare(qc.capture(nn.Sequential(nn.Conv2d(4, 4, 1, groups=4)).eval(), (x,)), "x86")
    qc.calibrate(program, [(x,)])
    assert proof(qc.convert(program)).is_safe


def test_long_sums_can_leave_32_bits() -> None:
    layer = nn.Linear(70_000, 1, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.rand(1, 70_000)
    program = qc.prepare(qc.capture(nn.Sequential(layer).eval(), (x,)), X86.but(act=UINT8))
    qc.calibrate(program, [(x,)])
    row = proof(qc.convert(program, reduce_range="no")).rows[0]
    assert row.high == 70_000 * 127 * 255 > 2**31
    assert row.safety is Safety.OVERFLOWS
    assert "can overflow" in str(proof(qc.convert(program, reduce_range="no")))


def test_a_program_without_integers_is_refused(prepared: Program) -> None:
    with pytest.raises(PipelineError, match="no integer weights yet"):
        accumulators(prepared)
    decomposed = qc.convert(prepared, to="integer", style="decomposed")
    with pytest.raises(PipelineError, match="ATen primitives"):
        accumulators(decomposed)
    assert decomposed.coverage().accumulators is None
    assert prepared.coverage().accumulators is None


def test_coverage_shows_it(prepared: Program) -> None:
    found = qc.convert(prepared, reduce_range="no").coverage()
    assert "can saturate on avx2" in str(found)
    data = json.loads(found.to_json())["accumulators"]
    assert data["is_safe"] is False
    first = data["rows"][0]
    assert (first["verdict"], first["saturates_on"]) == ("can saturate", ["avx2", "avx512"])
    pair = first["pairs"][0]
    assert pair["qmax"] == min(32767 // (pair["high"] // 255), 32768 // (-pair["low"] // 255))
    assert len(first["pairs"][0]["factors"]) == 8
    safe = qc.convert(prepared, reduce_range="activations").coverage()
    assert "accumulators: 8 products of integers" in str(safe)
    assert "the least that helps" not in str(safe)


def test_the_log_names_the_worst(prepared: Program) -> None:
    program = qc.convert(prepared, reduce_range="no")
    entry = next(entry for entry in program.log if entry.name == "prove-accumulators")
    assert not entry.changed
    assert "can saturate on avx2, avx512" in entry.notes[0]
    assert "activations up to 128" in entry.notes[1]  # two activations, whose bounds are the widest
    assert entry.notes[-1] == "and 5 more"


def test_the_command_line_shows_it(prepared: Program, tmp_path: Path) -> None:
    file = tmp_path / "net.qc"
    qc.convert(prepared).save(file)
    shown = CliRunner().invoke(app, ["inspect", str(file)])
    assert "accumulators: 8 products of integers" in shown.output
    table = CliRunner().invoke(app, ["inspect", str(file), "--accumulators"])
    assert "the least that helps" in table.output
    data = json.loads(CliRunner().invoke(app, ["inspect", str(file), "--json"]).output)
    assert len(data["accumulators"]["rows"]) == 8


# -- instruction sets --------------------------------------------------------------------------------------------------


def converted_for(instruction_set: str, reduce_range: RangeReduction = "no") -> Program:
    torch.manual_seed(1)
    x = torch.randn(4, 16)
    backend = replace(X86, instruction_set=instruction_set)
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(16, 8)).eval(), (x,)), backend)
    qc.calibrate(program, [(x,)])
    return qc.convert(program, reduce_range=reduce_range)


@pytest.mark.parametrize("name", ["avx-vnni", "avx512-vnni", "neon", "neon-dot"])
def test_where_products_go_into_32_bits_nothing_is_narrower(name: str) -> None:
    plain = converted_for(name)
    assert proof(plain).is_safe
    assert proof(plain).rows[0].saturates_on == ("avx2", "avx512")
    for what in get_args(RangeReduction):
        assert plain.dump("text") == converted_for(name, what).dump("text")


def test_without_an_instruction_set_all_of_them_count() -> None:
    assert proof(converted_for("")).rows[0].safety is Safety.SATURATES
    assert proof(converted_for("neon-mlal")).is_safe  # uint8 activations are shifted to int8; weights end at -127


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="avx3"):
        replace(X86, instruction_set="avx3")
    assert BACKENDS["x86"].instruction_set == "avx2"


# -- reduction ---------------------------------------------------------------------------------------------------------


def test_narrower_activations_make_every_product_safe(prepared: Program) -> None:
    before = prepared.dump("text")
    program = qc.convert(prepared, reduce_range="activations")
    assert proof(program).is_safe
    ends = [argument(node, "quant_max") for node in program.nodes() if is_dequantize(node)]
    ends = [end for end in ends if end != 127]  # of weights
    assert min(ends) >= 128
    assert 255 not in ends
    assert prepared.dump("text") == before
    assert not proof(qc.convert(prepared, reduce_range="no")).is_safe


def test_coarser_weights_make_every_product_with_weights_safe(prepared: Program) -> None:
    program = qc.convert(prepared, reduce_range="weights")
    left = proof(program).unsafe
    assert {row.op for row in left} == {"matmul"}
    assert all(row.channels == 1 for row in left)  # products of two activations have no weight to make coarser
    entry = next(entry for entry in program.log if entry.name.startswith("quantize"))
    assert any("8 of 8 weight scales raised" in note and "avx2" in note for note in entry.notes)
    assert sum("can still saturate: it has no weight" in note for note in entry.notes) == len(left)


def weight_of(program: Program) -> tuple[Tensor, Tensor]:
    node = next(node for node in program.nodes() if op_name(node) == "linear")
    w = argument(node, "w")
    levels, scale = program.tensor(w.args[0]), program.tensor(w.args[1])
    assert levels is not None
    assert scale is not None
    return levels, scale


def test_only_the_channels_that_need_it_change() -> None:
    """One weight far above all others makes no pair, nor do two that are no neighbours; two that are do."""
    layer = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-0.3, 0.3, 64).reshape(4, 16) / 4)
        layer.weight[:, 0] = torch.tensor([1.0, 1.0, -1.0, -1.0])
        layer.weight[0, 7] = 1.0
        layer.weight[1, 1], layer.weight[3, 1] = 1.0, -0.5
    x = torch.randn(8, 16)
    program = qc.prepare(qc.capture(nn.Sequential(layer).eval(), (x,)), "x86")
    qc.calibrate(program, [(x,)])
    (plain, plain_scale), (fitted, scale) = (
        weight_of(qc.convert(program, reduce_range=what)) for what in ("no", "weights")
    )
    assert (scale > plain_scale).tolist() == [False, True, False, True]
    assert torch.equal(plain[[0, 2]], fitted[[0, 2]])
    assert fitted[1].topk(2).values.sum() == 128  # 255 · 128 = 32 640; with 129 it would be 32 895
    assert fitted[3].topk(2, largest=False).values.sum() == -128
    assert proof(qc.convert(program, reduce_range="weights")).is_safe


class Tied(nn.Module):
    """One weight for two products, of which the activations are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.as_tensor(self.layer(torch.cat([self.layer(x), y])))


@pytest.mark.parametrize("what", ["weights", "activations"])
def test_what_shares_a_scale_goes_on_sharing_it(what: RangeReduction) -> None:
    torch.manual_seed(2)
    inputs = (torch.randn(4, 8), torch.randn(4, 8))
    backend = replace(BACKENDS["qnnpack"], instruction_set="avx2")
    program = qc.prepare(qc.capture(Tied().eval(), inputs), backend)
    qc.calibrate(program, [inputs])
    found = qc.convert(program, reduce_range=what)
    found.verify()
    assert proof(found).is_safe
    products = [node for node in found.nodes() if op_name(node) == "linear"]
    weights = [argument(node, "w").args[:2] for node in products]
    assert weights[0] == weights[1]
    join = next(node for node in found.nodes() if op_name(node) == "cat")
    grids = {value.args[1:5] for value in [*join.all_input_nodes, argument(products[1], "x")]}
    assert len(grids) == 1


# -- the default -------------------------------------------------------------------------------------------------------


def test_what_the_instruction_set_needs_is_done_unless_told_otherwise(prepared: Program) -> None:
    """Products with weights get coarser weights; those of two activations are left, and the log says so."""
    left = proof(qc.convert(prepared)).unsafe
    assert {(row.op, row.channels) for row in left} == {("matmul", 1)}
    assert qc.convert(prepared).dump("text") == qc.convert(prepared, reduce_range="weights").dump("text")
    notes = [note for entry in qc.convert(prepared).log for note in entry.notes]
    assert sum('it has no weight; reduce_range="activations" would do' in note for note in notes) == len(left)
    assert Pipeline.parse("quantize") == Pipeline.parse("quantize{reduce-range=auto}")
    assert str(qc.pipelines.convert("x86")).startswith("quantize,")


@pytest.mark.parametrize("backend", ["qnnpack", "executorch"])
def test_backends_that_add_no_pairs_lose_nothing(backend: str) -> None:
    torch.manual_seed(5)
    x = torch.randn(4, 16)
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(16, 8)).eval(), (x,)), backend)
    qc.calibrate(program, [(x,)])
    assert qc.convert(program).dump("text") == qc.convert(program, reduce_range="no").dump("text")


def test_activations_are_narrower_where_a_weight_cannot_be_coarser() -> None:
    """A weight with zero points: raising its scale would move these too."""
    torch.manual_seed(6)
    layer = nn.Linear(16, 8)
    with torch.no_grad():
        layer.weight.abs_()
    x = torch.randn(8, 16)
    affine = INT8_NARROW_WEIGHT.but(scheme="affine", qmin=-128)
    takes = (Capability.of(X86.outcome("act").spec), Capability.of(affine))
    backend = replace(
        X86, table=X86.table.only("linear"), roles={"act": UINT8, "weight": affine}, takes=takes, modes={}
    )
    program = qc.prepare(qc.capture(nn.Sequential(layer).eval(), (x,)), backend)
    qc.calibrate(program, [(x,)])
    safe, kept = (qc.convert(program, reduce_range=what) for what in ("auto", "weights"))
    assert proof(safe).is_safe
    assert not proof(kept).is_safe
    notes = [note for entry in safe.log for note in entry.notes]
    assert any("activations 0..1" in note for note in notes), notes


def test_a_fixed_scale_stays_what_it_is() -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 8)
    backend = X86.but(act=Fixed(1 / 64, 128, UINT8))
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(8, 8)).eval(), (x,)), backend)
    qc.calibrate(program, [(x,)])
    kept = qc.convert(program, reduce_range="activations")
    assert [row.safety for row in proof(kept).rows] == [Safety.SATURATES]
    notes = [note for entry in kept.log for note in entry.notes]
    assert any("can still saturate: the scale of its activations is fixed" in note for note in notes)
    assert proof(qc.convert(program, reduce_range="weights")).is_safe


def test_a_reduced_program_is_saved_as_it_is(prepared: Program, tmp_path: Path) -> None:
    program = qc.convert(prepared, reduce_range="activations")
    program.save(tmp_path / "net.qc")
    again = qc.load(tmp_path / "net.qc")
    assert proof(again).rows == proof(program).rows
    assert again.plan.groups == program.plan.groups


def test_an_unknown_reduction_is_refused(prepared: Program) -> None:
    with pytest.raises(QuantcError, match="there is no reduce_range 'bias'"):
        qc.convert(prepared, reduce_range="bias")  # type: ignore[arg-type]


def test_quantize_in_one_call_takes_it() -> None:
    torch.manual_seed(4)
    x = torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    safe, full = (qc.quantize(model, (x,), [(x,)], reduce_range=what) for what in ("auto", "no"))
    assert proof(safe.program).is_safe
    assert not proof(full.program).is_safe
    assert re.search(r"[1-8] of 8 weight scales raised, by up to 1\.\d+ times", str(safe.report))


def test_tables_end_where_the_narrowed_range_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    x = torch.randn(32, 16)
    prepared = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(prepared, [(x,)])
    for form in ("qdq", "integer"):
        found = accumulators(qc.convert(prepared, to=form, reduce_range="activations"))
        assert found.is_safe, str(found)
    assert not accumulators(qc.convert(prepared, to="integer", reduce_range="no")).is_safe
