"""A comparison of two programs: which ops cost most, what became zero, and how it is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.inspect.comparison import MAX_ROWS, Comparison, Layer, compare_programs
from quantc.inspect.size import Size
from quantc.ir.program import Program
from tests.support.by_hand import Builder, two_layers

aten = torch.ops.aten


def layer(node: str, sqnr: float, local: float | None) -> Layer:
    return Layer(node, "conv2d", "conv", f"net.{node}", "net.py:3", sqnr, local)


LAYERS = (
    layer("a", 30.0, 40.0),
    layer("b", math.inf, None),
    layer("c", 20.0, math.nan),
    layer("d", math.inf, math.inf),
    layer("e", 25.0, 12.5),
)
FOUND = Comparison("Net", 2, 22.5, (22.5, math.nan), LAYERS, Size(400, 100), ("a note",), (0.5, math.nan))


def test_the_costliest_come_first_and_what_is_no_number_before_all() -> None:
    assert [row.node for row in FOUND.worst()] == ["c", "e", "a", "d"]
    assert [row.node for row in FOUND.worst(2)] == ["c", "e"]
    assert [row.node for row in FOUND.farthest()] == ["c", "e", "a"]
    assert [row.node for row in FOUND.farthest(1)] == ["c"]


def test_rows_are_found_by_node() -> None:
    assert FOUND.layer("e") is LAYERS[4]
    assert FOUND.layer("relu") is None


def test_it_is_json_with_infinities_as_words() -> None:
    data = json.loads(FOUND.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert (data["program"], data["batches"], data["sqnr"], data["notes"]) == ("Net", 2, 22.5, ["a note"])
    assert [row["local"] for row in data["layers"][:2]] == [40.0, None]
    assert data["layers"][3]["local"] == "inf"
    assert data["size"]["ratio"] == 0.25


def test_it_prints_the_whole_and_the_ops_by_cost() -> None:
    head, title, columns, *rows = str(FOUND).splitlines()
    assert head == "Net: SQNR 22.5 dB over 2 batches; 400 bytes before, 100 after (0.250 of it)"
    assert "the worst first" in title
    assert columns.split()[:2] == ["node", "op"]
    assert [row.split()[0] for row in rows] == ["c", "e", "a", "d", "note:"]
    many = replace(FOUND, layers=tuple(layer(f"n{index}", 1.0, 1.0) for index in range(MAX_ROWS + 3)))
    assert "… and 3 more" in str(many)
    assert "first" not in str(replace(FOUND, layers=())), "without rows there is no table"


def quantized() -> tuple[Program, Program, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    x = torch.randn(6, 4)
    prepared = qc.prepare(qc.capture(model, (x,)), "x86")
    qc.calibrate(prepared, [x])
    return prepared, qc.convert(prepared), x


def test_programs_are_compared_over_batches() -> None:
    prepared, program, x = quantized()
    found = compare_programs(prepared, program, [x, x[:2]])
    assert found.batches == 2
    expected = torch.cat([prepared(x), prepared(x[:2])]).detach().double()
    noise = torch.cat([program(x), program(x[:2])]).detach().double() - expected
    assert found.sqnr == pytest.approx(10 * math.log10(expected.square().sum() / noise.square().sum()), abs=1e-4)
    assert found.largest == pytest.approx([float(noise.abs().max())], rel=1e-4)
    assert [row.module for row in found.layers if row.local is not None] == ["0", "2"]
    assert [row.rule for row in found.layers if row.op == "linear"] == ["linear", "linear"]
    assert found.size.after < found.size.before


def test_tensors_of_which_something_becomes_zero_are_named_with_their_readers() -> None:
    prepared, program, x = quantized()
    small = x.clone()
    small[:3] = 1e-4
    found = {row.node: row for row in compare_programs(prepared, program, [small]).vanished}
    (first,) = [node.name for node in program.graph.find_nodes(op="placeholder")]
    assert found[first].share == pytest.approx(0.5, abs=0.05)
    assert found[first].readers == ("linear",)
    assert compare_programs(prepared, prepared, [x]).vanished == ()


def test_the_integer_form_is_measured_by_its_outputs_and_that_is_said() -> None:
    prepared, _, x = quantized()
    found = compare_programs(prepared, qc.convert(prepared, to="integer"), [x])
    assert found.sqnr > 20
    assert all(row.local is None for row in found.layers)
    assert any("qc.agreement" in note for note in found.notes)


def test_what_has_no_counterpart_is_counted_and_five_are_named() -> None:
    def chain(op: object) -> Program:
        build = Builder()
        value = build.input("x", torch.ones(3))
        for _ in range(8):
            value = build.call(op, value)
            value.name = f"step_{value.name.rpartition('_')[2]}"
        return build.program(value)

    found = compare_programs(chain(aten.sin.default), chain(aten.cos.default), [torch.ones(3)])
    (note,) = found.notes
    assert note.startswith("8 nodes have no counterpart")
    assert note.count("step_") == 5
    assert note.endswith("and 3 more")


def test_outputs_without_floats_are_not_compared() -> None:
    build = Builder()
    x = build.input("x", torch.ones(3))
    program = build.program(build.call(aten.neg.default, x), build.call(aten.gt.Scalar, x, 0.5))
    found = compare_programs(program, program, [torch.ones(3)])
    assert found.sqnr == math.inf
    assert math.isnan(found.outputs[1])
    assert found.notes == ("output 1 holds no floats and is not compared",)


def test_the_programs_are_left_as_they_were() -> None:
    program = two_layers()
    before = program.dump()
    assert compare_programs(program, program, [torch.zeros(2, 4)]).sqnr == math.inf
    assert program.dump() == before
