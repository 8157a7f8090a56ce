"""The pass `fuse-epilogues`: kernels take in the activation of their result."""

from __future__ import annotations

import torch

from quantc.passes.fuse_epilogues import FuseEpilogues
from quantc.targets.kernels.kernel_nodes import kernels_of
from tests.support.by_hand import Builder, aten
from tests.support.kernel_programs import ROW, WEIGHT, Scaling, calls, on_kernel


def test_the_only_reader_of_a_kernel_is_taken_in() -> None:
    build = Builder()
    scaled = on_kernel(build, "mul", Scaling(WEIGHT), build.input("x", ROW))
    program = build.program(build.call(aten.relu.default, scaled))
    outcome = FuseEpilogues().run(program)
    assert calls(program) == []
    assert outcome.notes == ("fused 1 relu",)
    stand_ins = [program.placements.stands_for(node) for node, _ in kernels_of(program, program.graph)]
    assert stand_ins == ["relu"]
    assert program(ROW).tolist() == [[2.0, 0.0, 0.0]]


def test_what_a_kernel_refuses_or_others_read_too_stays() -> None:
    build = Builder()
    x = build.input("x", ROW)
    refusing = on_kernel(build, "first", Scaling(WEIGHT, absorbs=False), x)
    shared = on_kernel(build, "second", Scaling(WEIGHT), x)
    made = [build.call(aten.relu.default, node) for node in (refusing, shared)]
    program = build.program(*made, shared)
    FuseEpilogues().run(program)
    assert calls(program) == ["relu", "relu_1"]
    assert program.placements.stands_for(refusing) == "kernel_first"
    first, second, plain = program(ROW)
    assert torch.equal(first, second)
    assert plain.tolist() == [[2.0, -4.0, -3.0]]


class Greedy(Scaling):
    """A kernel that would take anything in."""

    def absorb(self, op: str) -> bool:
        return True


def test_an_op_that_reads_other_things_too_is_not_taken_in() -> None:
    build = Builder()
    x = build.input("x", ROW)
    scaled = on_kernel(build, "mul", Greedy(WEIGHT), x)
    program = build.program(build.call(aten.add.Tensor, scaled, x))
    FuseEpilogues().run(program)
    assert calls(program) == ["add"]
