"""End training: take the fake quantizers out, and fold the norms."""

from __future__ import annotations

from typing import ClassVar

from quantc.ir.program import Program, Stage
from quantc.passes.strip_dropout import StripDropout
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qat.control_flow import write_as_ops
from quantc.qat.fake_quantize_insertion import is_dropout
from quantc.qat.removal import (
    end_modes,
    fold_norms,
    forget_places,
    read_fake_quantizers,
    remove_fake_quantizers,
    unfold_norms,
)
from quantc.rewrite.constant_order import order_constants


class RemoveFakeQuantize(Pass):
    """Take out what `insert-fake-quantize` has put in, and keep what training has found: scales and zero points.

    Batch norms that were trained behind convolutions and linears are folded into them, and dropout goes. What is left is
    a program for inference, as calibration would leave it, which `quantize` makes the program that was trained of: in
    eval mode it gave the same bits.
    """

    name: ClassVar[str] = "remove-fake-quantize"
    needs: ClassVar[Stage] = Stage.OBSERVED
    gives: ClassVar[Stage | None] = Stage.CALIBRATED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    def run(self, program: Program) -> Outcome:
        if not program.is_live:
            return Outcome(False)
        read_fake_quantizers(program)
        count = remove_fake_quantizers(program)
        norms = fold_norms(program)
        _tidy(program)
        return Outcome(True, (f"{count} fake quantizers removed, {norms} norms folded",))


def as_inference_has_it(program: Program) -> Program:
    """A copy to look at, without what training needs. Nothing is folded: its weights are those that are trained."""
    copy = program.draft()
    remove_fake_quantizers(copy)
    unfold_norms(copy)
    _tidy(copy)
    return copy


def _tidy(program: Program) -> None:
    end_modes(program)
    write_as_ops(program)
    forget_places(program, {node for node in program.nodes() if is_dropout(program, node)})
    StripDropout().run(program)
    for _, graph in program.graphs():
        for node in reversed(graph.find_nodes(op="get_attr")):
            if not node.users:
                program.erase(node)
        order_constants(program, graph)
