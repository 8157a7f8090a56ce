"""`qc.recover`: wins back accuracy that rounding costs, before a calibrated program is converted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from quantc import pipelines
from quantc.calibration.observe_again import observe_again
from quantc.errors import CalibrationError, PipelineError
from quantc.ir.batch_inputs import Inputs, are_lasting, check_batches, leaves_of, select_inputs
from quantc.ir.program import Program, Stage, check_has_plan, check_program
from quantc.passes.leave_float import LeaveFloat
from quantc.pipeline.pipeline import Hook, Pipeline, hooks_of
from quantc.qdq.fitted_constants import check_fitted
from quantc.recover.fitting import TELL
from quantc.recover.judging_batches import BATCHES, MOST, judging_on
from quantc.recover.transforming import SEE_AGAIN
from quantc.support.progress import Style, Told, show_progress
from quantc.verbs.prepare import check_stage


def recover(
    prepared: Program,
    passes: str | Pipeline = "auto",
    *,
    batches: Iterable[Any] | None = None,
    inputs: Inputs | None = None,
    progress: Style | Told = "auto",
    hooks: Sequence[Hook] = (),
) -> Program:
    """A prepared program whose weights are fitted to the data that it was calibrated with.

    It takes what `qc.calibrate(prepared, batches, collect="recover")` has collected. Passes fit weights to the even
    batches; each output of a layer keeps the change only where it lowers the error on the odd ones, so that no layer
    becomes worse than rounded to nearest. `passes` is pipeline text, a pipeline, or "auto", which is
    `qc.pipelines.recover()`. What became of each layer is in `program.recovery()` and in the log.

    Transforms such as `equalize` come first. They move factors between the program's constants, so that its numbers stay
    and its tensors get ranges that quantize better; `batches`, the calibration's, are for the ranges that change by that.
    Without them, such tensors stay as they are. `leave-float` runs the program on the first four of them. `inputs` is as in `qc.calibrate`.

    The program computes what it did, and keeps float weights; `qc.convert` puts the fitted ones in their place.
    `prepared` is not modified. `progress` is as in `qc.calibrate`; `hooks` are called around every pass.
    """
    check_program(prepared, "recover", "prepared = qc.prepare(qc.capture(model, example_inputs), backend)")
    if prepared.stage < Stage.SHARED:
        raise CalibrationError(
            f"{prepared.name} was not prepared",
            where=f"its stage is {prepared.stage.label}",
            advice='call qc.prepare and qc.calibrate(prepared, batches, collect="recover") first',
        )
    check_stage(prepared, Stage.QUANTIZED, "converted")
    check_has_plan(prepared, "recover")
    if prepared.is_live:
        raise CalibrationError(
            f"{prepared.name} was prepared to be trained, and its weights learn",
            where="qat=True",
            advice="train it, or prepare without qat=True",
        )
    check_fitted(prepared)
    pipeline = _pipeline(passes)
    if not prepared.plan.collected and not all(isinstance(each, LeaveFloat) for each in pipeline):
        raise CalibrationError(
            f"nothing was collected of what the layers of {prepared.name} read",
            where="qc.recover",
            advice='collect it: qc.calibrate(prepared, batches, collect="recover")',
        )
    better = prepared.draft()
    see = None if batches is None else _seeing(prepared, batches, inputs)
    judging = BATCHES.get() if batches is None else _judging(prepared, batches, inputs)
    with show_progress(f"fitting {prepared.name}", progress, unit="layers") as told, judging_on(judging):
        token, seeing = TELL.set(_Counter(told)), SEE_AGAIN.set(see)
        try:
            return pipeline.run(better, hooks_of(hooks))
        finally:
            TELL.reset(token)
            SEE_AGAIN.reset(seeing)


def _seeing(
    prepared: Program, batches: Iterable[Any], inputs: Inputs | None
) -> Callable[[Program, Sequence[str]], str]:
    """Observes ranges with batches, which several passes may ask for."""
    check_batches(batches)
    if not are_lasting(batches):
        raise CalibrationError(
            "the batches can be gone through once only, and each pass that changes ranges takes them",
            where=f"qc.recover(batches={type(batches).__name__})",
            advice="give them as a list, or anything that can be iterated again",
        )
    return lambda program, names: observe_again(program, select_inputs(batches, inputs, prepared), names)


def _judging(prepared: Program, batches: Iterable[Any], inputs: Inputs | None) -> list[Any]:
    """The batches to run the whole program on. InputError before any pass if one does not fit."""
    found = list(islice(select_inputs(batches, inputs, prepared), MOST))
    for index, batch in enumerate(found):
        leaves_of(prepared, batch, index)
    return found


class _Counter:
    """Counts layers for a progress callback."""

    def __init__(self, told: Told) -> None:
        self._told, self._done = told, 0

    def __call__(self, name: str) -> None:
        self._done += 1
        self._told(self._done, None)


def _pipeline(passes: str | Pipeline) -> Pipeline:
    found = pipelines.recover() if passes == "auto" else Pipeline.of(passes)
    for each in found:
        if each.gives is not None or each.before is None or each.before > Stage.QUANTIZED:
            raise PipelineError(
                f"{each.name} is no pass that fits or transforms weights",
                where=str(found),
                advice=f"choose among those of qc.pipelines.recover(): {pipelines.recover()}",
            )
    return found
