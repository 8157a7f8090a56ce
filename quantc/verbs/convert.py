"""`qc.convert`: converts a prepared and calibrated program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from quantc import pipelines
from quantc.calibration.graph_observers import read_observers
from quantc.errors import CalibrationError, QuantcError, suggest
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.finite_inputs import refuse_hollow
from quantc.ir.plan import Source
from quantc.ir.program import TRAINED, Program, Stage, check_has_plan, check_program
from quantc.observe.store import WITHHELD, WITHHELD_ADVICE, Withheld
from quantc.passes.remove_fake_quantize import RemoveFakeQuantize
from quantc.pipeline.pipeline import Hook, Pipeline, hooks_of
from quantc.pipelines import Style
from quantc.spec.arithmetic import MultiplierChoice
from quantc.support.gc_pause import paused_collector
from quantc.targets.target import check_invariants
from quantc.text.node_printer import OpaqueModule
from quantc.verbs.prepare import check_stage
from quantc.verify.finite_constants import refuse_unsound

Form = Literal["qdq", "integer"]
FEW = 3
FORMS: tuple[Form, ...] = ("qdq", "integer")


def check_form(to: str) -> None:
    """Refuse an unknown form."""
    if to not in FORMS:
        raise QuantcError(f"unknown form {to!r}", where=f"to={to!r}", advice=suggest(str(to), FORMS, noun="forms"))


def convert(
    prepared: Program,
    to: Form = "qdq",
    *,
    multiplier: MultiplierChoice = "target",
    style: Style = "fused",
    reduce_range: RangeReduction = "auto",
    hooks: Sequence[Hook] = (),
) -> Program:
    """Convert a prepared and calibrated program to Q/DQ form, with weights stored quantized.

    `to="integer"` continues to integer arithmetic: exact sums, and one rounding onto the grid of each result, as the
    target of the backend's name computes (`Target.arithmetic`; half to even in float64 unless it says otherwise).
    `multiplier="fixed"` rounds with a 32-bit mantissa and a shift, "shift" with a shift alone. `style="decomposed"` uses ATen
    primitives, where "fused" has ops of its own, `torch.ops.quantc`.

    Where two products could overflow the 16 bits in which the backend's instruction set adds them, ranges are reduced
    by the minimum that excludes it, and the log says where. `reduce_range="weights"` raises the weight scales of the
    channels concerned, "activations" lowers the largest activation, "auto" is weights unless they cannot be coarser.
    With "no" nothing is changed, and `program.coverage()` reports what could happen.

    InvariantError if the program breaks an invariant of the target that has the backend's name. The prepared program is not
    modified and can be calibrated further. The pipelines are `qc.pipelines.convert()` and
    `qc.pipelines.integer()`. `hooks` are called around every pass: see `qc.hooks`.
    """
    check_form(to)
    hooks = hooks_of(hooks)
    integer = pipelines.integer(multiplier, style)
    if to == "qdq" and (multiplier, style) != ("target", "fused"):
        raise QuantcError(
            "multiplier and style are choices of the integer form, and the Q/DQ form was asked for",
            where=f"multiplier={multiplier!r}, style={style!r}",
            advice='give to="integer" too',
        )
    check_program(prepared, "convert", "prepared = qc.prepare(qc.capture(model, example_inputs), backend)")
    if prepared.stage < Stage.SHARED:
        raise CalibrationError(
            f"{prepared.name} was not prepared",
            where=f"its stage is {prepared.stage.label}",
            advice="call qc.prepare first",
        )
    check_stage(prepared, Stage.QUANTIZED, "converted")
    check_has_plan(prepared, "convert")
    if prepared.plan.groups:
        refuse_hollow(prepared.name, prepared.root)
    with paused_collector():
        converted = _convert_copy(prepared, reduce_range, hooks)
        check_invariants(converted)
        return integer.run(converted, hooks) if to == "integer" else converted


def refuse_withheld(program: Program) -> None:
    """Raise CalibrationError if statistics that scales come from have no numbers."""
    known = program.plan.statistics
    lost = [group.name for group in program.plan.groups if isinstance(known.get(group.name), Withheld)]
    if lost:
        raise CalibrationError(WITHHELD, where=", ".join(lost[:FEW]), advice=WITHHELD_ADVICE)


def _refuse_untold(program: Program) -> None:
    """Raise CalibrationError if what training found is not here: text does not hold it."""
    if any(isinstance(module, OpaqueModule) for module in program.root.get_submodule(TRAINED).modules()):
        raise CalibrationError(
            f"{program.name} was parsed from text, which does not hold what its fake quantizers have learned",
            where="qat=True",
            advice="convert the program that was trained, or prepare the model anew and load prepared.state_dict()",
        )


def _convert_copy(prepared: Program, reduce_range: RangeReduction, hooks: Sequence[Hook]) -> Program:
    pipeline = pipelines.convert(prepared.plan.quantizer, reduce_range)
    copy = prepared.draft()
    copy.plan.collected = {}
    if copy.is_live:
        _refuse_untold(copy)
        refuse_unsound(copy)
        return Pipeline((RemoveFakeQuantize(),)).then(pipeline).run(copy, hooks)
    read_observers(copy)
    if not any(group.source is Source.DATA for group in copy.plan.groups):
        copy.stage = max(copy.stage, Stage.CALIBRATED)  # weights alone need no data
    refuse_withheld(copy)
    if copy.stage < Stage.CALIBRATED:
        raise CalibrationError(
            f"{prepared.name} was not calibrated",
            where=f"its stage is {prepared.stage.label}",
            advice="call qc.calibrate(prepared, batches) first",
        )
    return pipeline.run(copy, hooks)
