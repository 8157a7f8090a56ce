"""End of quantization-aware training: removes fake quantizers and folds norms."""

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
    """Remove the fake quantizers of `insert-fake-quantize`, and keep the trained scales and zero points.

    Batch norms trained after convolutions and linears are folded into them, and dropout is removed. The result is an
    inference program like a calibrated one; `quantize` turns it into one that computes the same bits as the trained
    program in eval mode.
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
    """A copy for inspection, without the ops for training. Nothing is folded: its weights are those being trained."""
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
