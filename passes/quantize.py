"""Insertion of quantize and dequantize ops by plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from quantc.calibration.graph_observers import remove_observers
from quantc.calibration.qparams import find_qparams
from quantc.integer.lowerings.lower_recurrent import state_notes
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.plan import Group, Source, spec_of
from quantc.ir.program import Program, Stage
from quantc.pipeline.pipeline import Outcome, Pass, Preserves
from quantc.qdq.fitted_constants import put_fitted
from quantc.qdq.insertion import PlanWriter
from quantc.qdq.ops import Scales, scales_for
from quantc.verify.finite_constants import refuse_unsound


class QuantizePass(Pass):
    """Insert quantize and dequantize ops (`quantized_decomposed`) according to the plan.

    A tensor that its op yields quantized is dequantized for every user. One that only some users want quantized is so
    for them alone. A user that wants other qparams than the tensor has gets it requantized. Scales come from
    calibration statistics, and from the weights themselves.

    With `reduce_range` weight scales grow, or the highest activation level is lowered, wherever two products could
    otherwise overflow the 16 bits in which the backend's instruction set adds them: see docs/overflow.md.
    """

    name: ClassVar[str] = "quantize"
    needs: ClassVar[Stage] = Stage.CALIBRATED
    gives: ClassVar[Stage | None] = Stage.QUANTIZED
    before: ClassVar[Stage | None] = Stage.QUANTIZED
    preserves: ClassVar[Preserves] = Preserves.NOTHING

    reduce_range: RangeReduction = "auto"
    """The side to narrow where pairs of products could overflow: "weights", "activations", or "no", neither; "auto" is
    what the backend's instruction set needs."""

    def run(self, program: Program) -> Outcome:
        remove_observers(program)
        fitted = put_fitted(program)
        refuse_unsound(program)
        qparams, notes = find_qparams(program, self.reduce_range)
        program.plan.qparams = qparams
        count = PlanWriter(program, _scales(program)).write()
        program.note_inference_only("it was quantized with fixed scales")
        told = (f"{fitted} constants fitted to the data",) if fitted else ()
        return Outcome(count > 0, (f"{count} tensors quantized", *told, *notes, *state_notes(program)))


def _scales(program: Program) -> Callable[[Group, str], Scales]:
    """Quantization of each group, with its qparams."""

    def of(group: Group, hint: str) -> Scales:
        qparams = None if group.source is Source.RUN_TIME else program.plan.qparams[group.name]
        return scales_for(program, hint, qparams, spec_of(group, qparams))

    return of
