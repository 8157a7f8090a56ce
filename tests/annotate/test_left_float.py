"""The ops that were left float, with reasons: a line for each kind, or a reason for each op."""

from __future__ import annotations

from operator import getitem

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.left_float import ops_of, why_float, why_not_quantized
from quantc.ir.program import Program
from tests.support.hand_quantizers import LINEAR, annotated, table
from tests.support.pattern_graphs import Build
from tests.support.small_backend import SMALL

aten = torch.ops.aten


def of_many_kinds() -> Program:
    """Two small matmuls, a large one, and ops without products; none of which the backend takes."""
    build = Build()
    x, y, large = build.input("x", 2, 4), build.input("y", 4, 2), build.input("large", 2, 4, 64)
    matmul = build("matmul", x, y, name="small_one")
    again = build("matmul", y, x, name="small_two")
    conv = build("conv1d", large, build("neg", build.const("w", 3, 4, 5)), None)
    return build.done(build("tanh", matmul), again, build("exp", conv))


def test_kinds_with_the_most_work_come_first_and_each_has_one_line() -> None:
    lines = why_float(annotated(of_many_kinds(), SMALL))
    assert lines[0].startswith("conv1d (conv1d): ")
    assert lines[1].startswith("small_one (one of 2 matmul): ")
    assert lines[1].endswith("small has no rule for matmul")
    assert sorted(line.partition(" ")[0] for line in lines[2:]) == ["exp", "neg", "tanh"]


def test_kinds_beyond_the_limit_are_counted() -> None:
    program = annotated(of_many_kinds(), SMALL)
    lines = why_float(program, most=2)
    assert len(lines) == 3
    assert lines[:2] == why_float(program)[:2]
    assert lines[-1] == "and 3 other kinds of ops"
    assert len(why_float(program, most=5)) == 5


def test_what_was_quantized_is_not_told() -> None:
    build = Build()
    linear = build("linear", build.input("x", 2, 4), build.const("w", 3, 4), None)
    program = annotated(build.done(build("tanh", linear)), SMALL)
    assert [line.partition(" ")[0] for line in why_float(program)] == ["tanh"]


def test_only_nodes_that_compute_tensors_are_ops() -> None:
    build = Build()
    x = build.input("x", 4, 6)
    parts = build("split", x, 2)
    first = build.call(getitem, parts, 0, name="first")
    size = build.call(aten.sym_size.int, x, 0, name="size")
    build.call(aten._assert_async.msg, build("neg", build.const("flag", 1)), "fine", name="check")
    program = build.done(build("relu", first), size)
    assert [node.name for _, node in ops_of(program)] == ["split", "neg", "relu"]


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.sum() > 0, torch.tanh, torch.exp, (self.layer(x),))
        return chosen


def test_ops_of_branches_are_told_with_the_path_of_their_graph() -> None:
    program = annotated(qc.capture(Branches().eval(), (torch.randn(2, 4),)), SMALL)
    paths = {node.name: path for path, node in ops_of(program)}
    assert paths["linear"] == ""
    assert len({paths["linear"], paths["tanh"], paths["exp"]}) == 3
    assert not any("cond" in name for name in paths)
    assert f"{paths['exp']}/exp (exp): small has no rule for exp" in why_float(program)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


def test_each_float_op_of_a_converted_program_has_its_reason() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    prepared = qc.prepare(qc.capture(Mixed().eval(), (x,)), table("one", LINEAR))
    qc.calibrate(prepared, [x], progress="silent")
    converted = qc.convert(prepared)
    found = why_not_quantized(converted)
    assert {node.name: reason for node, reason in found.items()} == {"tanh": "one has no rule for tanh"}
    assert all(node.graph is converted.graph for node in found)


def test_a_reason_that_was_recorded_is_told_as_it_is() -> None:
    build = Build()
    tanh = build("tanh", build.input("x", 2, 4))
    program = annotated(build.done(tanh), SMALL)
    program.plan.left_float[tanh] = "for a reason of its own"
    assert why_not_quantized(program) == {tanh: "for a reason of its own"}
