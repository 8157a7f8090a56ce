"""The report of what sums can come to: bounds, verdicts and advice, in both forms of a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import quantc as qc
from quantc.backends.x86 import X86
from quantc.cli.app import app
from quantc.errors import PipelineError
from quantc.integer.proof.overflow_report import MAX_ROWS, Accumulators, PairBound, Safety, SumRow, accumulators
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.dialect import argument, op_name
from quantc.ir.program import Program
from quantc.spec.spec import UINT8
from tests.support.proven_models import linear_for, prepared_products


@pytest.fixture(scope="module")
def prepared() -> Program:
    return prepared_products()


def test_every_product_has_a_row(prepared: Program) -> None:
    found = accumulators(qc.convert(prepared, reduce_range="no"))
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
    found = accumulators(program).row(node.name)
    assert found is not None
    assert found.pair is not None
    assert (found.high, found.pair.high) == (max(highest), max(pair))


def test_the_integer_form_has_the_same_bounds(prepared: Program) -> None:
    for what in get_args(RangeReduction):
        qdq = accumulators(qc.convert(prepared, reduce_range=what))
        integer = accumulators(qc.convert(prepared, to="integer", reduce_range=what))
        assert [row.pairs for row in integer.rows] == [row.pairs for row in qdq.rows]
        assert [(row.low, row.high) for row in integer.rows] == [(row.low, row.high) for row in qdq.rows]
        assert [row.instruction_set for row in integer.rows] == ["avx2"] * len(qdq.rows)


def test_one_weight_a_sum_is_safe() -> None:
    x = torch.randn(2, 4, 5, 5)
    program = qc.prepare(qc.capture(nn.Sequential(nn.Conv2d(4, 4, 1, groups=4)).eval(), (x,)), "x86")
    qc.calibrate(program, [(x,)])
    assert accumulators(qc.convert(program)).is_safe


def test_long_sums_can_leave_32_bits() -> None:
    layer = nn.Linear(70_000, 1, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.rand(1, 70_000)
    program = qc.prepare(qc.capture(nn.Sequential(layer).eval(), (x,)), X86.but(act=UINT8))
    qc.calibrate(program, [(x,)])
    row = accumulators(qc.convert(program, reduce_range="no")).rows[0]
    assert row.high == 70_000 * 127 * 255 > 2**31
    assert row.safety is Safety.OVERFLOWS
    assert "can overflow" in str(accumulators(qc.convert(program, reduce_range="no")))


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


def test_the_command_line_shows_it(prepared: Program, tmp_path: Path) -> None:
    file = tmp_path / "net.qc"
    qc.convert(prepared).save(file)
    shown = CliRunner().invoke(app, ["inspect", str(file)])
    assert "accumulators: 8 products of integers" in shown.output
    table = CliRunner().invoke(app, ["inspect", str(file), "--accumulators"])
    assert "the least that helps" in table.output
    data = json.loads(CliRunner().invoke(app, ["inspect", str(file), "--json"]).output)
    assert len(data["accumulators"]["rows"]) == 8


def test_without_an_instruction_set_all_of_them_count() -> None:
    assert accumulators(linear_for("")).rows[0].safety is Safety.SATURATES
    assert accumulators(linear_for("neon-mlal")).is_safe  # uint8 activations are shifted to int8; weights end at -127


# -- rows by hand --------------------------------------------------------------------------------------------------


def pair(name: str, high: int = 100, factors: tuple[tuple[int, float], ...] = (), qmax: int | None = 255) -> PairBound:
    return PairBound(name, -high, high, factors, qmax)


def row(*pairs: PairBound, on: str = "avx2", bits: int | None = 20, node: str = "linear") -> SumRow:
    return SumRow(node, "linear", "", "", on, 4, -5, 5, bits, pairs)


WIDE = ((0, 1.5), (3, 1.98))
"""Two channels whose pairs can leave 16 bits."""


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (row(), Safety.SAFE),
        (row(bits=32), Safety.SAFE),
        (row(bits=33), Safety.OVERFLOWS),
        (row(pair("avx2", 40_000, WIDE), bits=33), Safety.OVERFLOWS),
        (row(pair("avx2", 40_000, WIDE)), Safety.SATURATES),
        (row(pair("avx2", 40_000, WIDE), on="neon-mlal"), Safety.SAFE),
        (row(pair("avx2", 40_000, WIDE), on=""), Safety.SATURATES),
        (row(bits=None), Safety.UNKNOWN),
        (row(pair("avx2", 40_000, WIDE), bits=None), Safety.SATURATES),
    ],
)
def test_the_verdict_is_for_the_instruction_set_of_the_backend(found: SumRow, verdict: Safety) -> None:
    assert found.safety is verdict


def test_the_bound_of_pairs_is_that_of_the_instruction_set_or_the_first() -> None:
    avx, neon = pair("avx2", 40_000, WIDE), pair("neon-mlal", 7)
    assert row(avx, neon, on="neon-mlal").pair is neon
    assert row(neon, avx).pair is avx
    assert row(avx, neon, on="").pair is avx
    assert row(avx, neon, on="neon").pair is None
    assert row(avx, neon).saturates_on == ("avx2",)


@pytest.mark.parametrize(
    ("bound", "advice"),
    [
        (pair("avx2", 40_000, WIDE, 129), "activations up to 129, or scales of 2 of 4 channels × 1.98"),
        (pair("avx2", 40_000, WIDE, None), "scales of 2 of 4 channels × 1.98"),
        (pair("avx2", 40_000, ((0, 0.0),), 128), "activations up to 128"),  # two activations have no scales to grow
        (pair("avx2"), ""),
    ],
)
def test_the_advice_is_the_least_that_helps(bound: PairBound, advice: str) -> None:
    assert row(bound).advice == advice
    assert str(row(bound)).endswith(advice or "safe")


def test_the_worst_come_first_and_the_headline_counts_each_verdict() -> None:
    rows = (
        row(pair("avx2", 40_000, WIDE), node="wide"),
        row(node="fine"),
        row(pair("avx2", 60_000, WIDE), node="wider"),
        row(bits=None, node="unknown"),
    )
    found = Accumulators("Net", rows)
    assert [each.node for each in found.unsafe] == ["wider", "wide", "unknown"]
    assert found.row("fine") is rows[1]
    assert found.row("none") is None
    assert found.headline == (
        "4 products of integers, accumulators of at most 20 bits; 1 safe; 2 can saturate on avx2; 1 not known"
    )
    assert Accumulators("Net", ()).headline == "no products of integers"
    assert Accumulators("Net", ()).is_safe


def test_long_tables_are_cut_and_say_so() -> None:
    rows = tuple(row(node=f"linear_{index}") for index in range(MAX_ROWS + 3))
    lines = Accumulators("Net", rows).table(rows)
    assert lines[-1].strip() == "… and 3 more"
    assert any(f"linear_{MAX_ROWS - 1} " in line for line in lines)
    assert not any(f"linear_{MAX_ROWS} " in line for line in lines)
