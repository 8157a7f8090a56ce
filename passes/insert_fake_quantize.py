"""Insertion of fake quantizers for quantization-aware training."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import nn

from quantc.annotate.quantizer import finishing_passes
from quantc.errors import TrainingError
from quantc.ir.program import TRAINED, Program, Stage
from quantc.passes.snap_bias import SnapBias
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qat.biases import snap_trained_biases
from quantc.qat.build import Builder
from quantc.qat.control_flow import write_as_python
from quantc.qat.fake_quantize_insertion import FakeWriter, follow_modes, return_norms, unfold_norms
from quantc.qat.weight_range import narrow_weights
from quantc.rewrite.constant_order import order_constants


class InsertFakeQuantize(Pass):
    """Insert fake quantizers where `quantize` will insert quantize and dequantize ops, and put batch norms back.

    A fake quantizer rounds to the grid of its sharing group and passes gradients (straight-through); it finds its scale
    as the spec's `observe` says. `minmax` is the range of everything seen in training, `moving-average` follows it,
    `lsq` and `lsq-plus` are learned, and observers meant for calibration, such as `mse`, become a moving average, which
    the log says. Weights use their current range at each step. A tensor that is only moved is not rounded again in
    training.

    Batch norms that `detach-norms` has removed are trained with the rounded weights they will be folded into. The
    program ends in training mode. `.train()` and `.eval()` change no node from then on, so that they also apply to a
    module that is already in use elsewhere; the graphs of higher-order ops run as plain Python.

    Where two products could overflow the 16 bits in which the backend's instruction set adds them, weights are trained
    in a narrower range, so that `convert` has nothing left to reduce. Where `snap-bias` ends the conversion, biases are
    trained on the accumulator's grid too.

    A program without a parameter that takes a gradient is refused, unless `untrained` is allow: then only ranges follow
    the data.
    """

    name: ClassVar[str] = "insert-fake-quantize"
    needs: ClassVar[Stage] = Stage.SHARED
    gives: ClassVar[Stage | None] = Stage.OBSERVED
    before: ClassVar[Stage | None] = Stage.OBSERVED
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    untrained: Literal["refuse", "allow"] = "refuse"

    def run(self, program: Program) -> Outcome:
        if program.is_live:
            return Outcome(False)
        _refuse_untrainable(program, self.untrained == "allow")
        notes = narrow_weights(program)
        program.train()
        returned = return_norms(program)
        builder = Builder(program)
        FakeWriter(program, builder, returned).write()
        if any(isinstance(step, SnapBias) for step in finishing_passes(program.plan.quantizer)):
            snap_trained_biases(program)
        unfold_norms(program, returned)
        follow_modes(program)
        write_as_python(program)
        if TRAINED not in program.root._modules:
            program.root.add_module(TRAINED, nn.Module())
        program.root.train()
        for _, graph in program.graphs():
            order_constants(program, graph)
        averaged = [
            f"{count} ranges follow a moving average in training; {asked} is for calibration"
            for asked, count in builder.averaged.items()
        ]
        return Outcome(True, (f"{len(builder.built)} fake quantizers, {len(returned)} norms", *averaged, *notes))


def _refuse_untrainable(program: Program, allow_untrained: bool) -> None:
    if program.inference_only:
        raise TrainingError(
            f"{program.name} cannot be trained: {program.inference_only[0]}",
            where="; ".join(program.inference_only),
            advice="change the model so that this is not needed, or calibrate instead: qc.prepare without qat=True",
        )
    if not allow_untrained and not any(parameter.requires_grad for parameter in program.parameters()):
        raise TrainingError(
            f"{program.name} has no parameter that takes a gradient",
            where="every parameter has requires_grad=False",
            advice="capture a model whose parameters can be trained, or calibrate instead: qc.prepare without qat=True",
        )
    if torch.is_inference_mode_enabled():
        raise TrainingError(
            "nothing can be trained in inference mode",
            where="torch.inference_mode()",
            advice="prepare outside of it",
        )
