"""The proof on whole programs, and ranges that are made narrower where it asks for it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.errors import QuantcError
from quantc.integer.proof.overflow_report import Safety, accumulators
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.decisions import Fixed
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Pipeline
from quantc.pipeline.registry import BACKENDS
from quantc.qdq.ops import is_dequantize
from quantc.spec.capability import Capability
from quantc.spec.spec import INT8_NARROW_WEIGHT, UINT8
from tests.support.proven_models import linear_for, prepared_products


@pytest.fixture(scope="module")
def prepared() -> Program:
    return prepared_products()


# -- instruction sets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["avx-vnni", "avx512-vnni", "neon", "neon-dot"])
def test_where_products_go_into_32_bits_nothing_is_narrower(name: str) -> None:
    plain = linear_for(name)
    assert accumulators(plain).is_safe
    assert accumulators(plain).rows[0].saturates_on == ("avx2", "avx512")
    for what in get_args(RangeReduction):
        assert plain.dump("text") == linear_for(name, what).dump("text")


# -- reduction ---------------------------------------------------------------------------------------------------------


def test_narrower_activations_make_every_product_safe(prepared: Program) -> None:
    before = prepared.dump("text")
    program = qc.convert(prepared, reduce_range="activations")
    assert accumulators(program).is_safe
    ends = [argument(node, "quant_max") for node in program.nodes() if is_dequantize(node)]
    ends = [end for end in ends if end != 127]  # of weights
    assert min(ends) >= 128
    assert 255 not in ends
    assert prepared.dump("text") == before
    assert not accumulators(qc.convert(prepared, reduce_range="no")).is_safe


def test_coarser_weights_make_every_product_with_weights_safe(prepared: Program) -> None:
    program = qc.convert(prepared, reduce_range="weights")
    left = accumulators(program).unsafe
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
    assert accumulators(qc.convert(program, reduce_range="weights")).is_safe


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
    assert accumulators(found).is_safe
    products = [node for node in found.nodes() if op_name(node) == "linear"]
    weights = [argument(node, "w").args[:2] for node in products]
    assert weights[0] == weights[1]
    join = next(node for node in found.nodes() if op_name(node) == "cat")
    grids = {value.args[1:5] for value in [*join.all_input_nodes, argument(products[1], "x")]}
    assert len(grids) == 1


# -- the default -------------------------------------------------------------------------------------------------------


def test_what_the_instruction_set_needs_is_done_unless_told_otherwise(prepared: Program) -> None:
    """Products with weights get coarser weights; those of two activations are left, and the log says so."""
    left = accumulators(qc.convert(prepared)).unsafe
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
    assert accumulators(safe).is_safe
    assert not accumulators(kept).is_safe
    notes = [note for entry in safe.log for note in entry.notes]
    assert any("activations 0..1" in note for note in notes), notes


def test_a_fixed_scale_stays_what_it_is() -> None:
    torch.manual_seed(3)
    x = torch.randn(4, 8)
    backend = X86.but(act=Fixed(1 / 64, 128, UINT8))
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(8, 8)).eval(), (x,)), backend)
    qc.calibrate(program, [(x,)])
    kept = qc.convert(program, reduce_range="activations")
    assert [row.safety for row in accumulators(kept).rows] == [Safety.SATURATES]
    notes = [note for entry in kept.log for note in entry.notes]
    assert any("can still saturate: the scale of its activations is fixed" in note for note in notes)
    assert accumulators(qc.convert(program, reduce_range="weights")).is_safe


def test_a_reduced_program_is_saved_as_it_is(prepared: Program, tmp_path: Path) -> None:
    program = qc.convert(prepared, reduce_range="activations")
    program.save(tmp_path / "net.qc")
    again = qc.load(tmp_path / "net.qc")
    assert accumulators(again).rows == accumulators(program).rows
    assert again.plan.groups == program.plan.groups


def test_an_unknown_reduction_is_refused(prepared: Program) -> None:
    with pytest.raises(QuantcError, match="unknown reduce_range 'bias'"):
        qc.convert(prepared, reduce_range="bias")  # type: ignore[arg-type]


def test_quantize_in_one_call_takes_it() -> None:
    torch.manual_seed(4)
    x = torch.randn(4, 16)
    model = nn.Sequential(nn.Linear(16, 8)).eval()
    safe, full = (qc.quantize(model, (x,), [(x,)], reduce_range=what) for what in ("auto", "no"))
    assert accumulators(safe.program).is_safe
    assert not accumulators(full.program).is_safe
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


@pytest.mark.parametrize("bits", [1, 3])
def test_raised_scales_have_the_bits_of_the_spec(bits: int) -> None:
    torch.manual_seed(3)
    x = torch.randn(16, 64)
    weight = X86.outcome("weight").spec.but(scale_bits=bits)
    backend = replace(X86.but(weight=weight, act=UINT8.but(scale_bits=bits)), takes=(), instruction_set="avx2")
    program = qc.prepare(qc.capture(nn.Sequential(nn.Linear(64, 8)).eval(), (x,)), backend)
    qc.calibrate(program, [(x,)])
    converted = qc.convert(program, reduce_range="weights")
    assert any("weight scales raised" in note for entry in converted.log for note in entry.notes)
    assert accumulators(converted).is_safe
    for name in ("linear:in0", "linear:in1"):
        mantissa = torch.frexp(converted.plan.qparams[name].scale).mantissa.double() * 2.0**bits
        assert torch.equal(mantissa, mantissa.round())
