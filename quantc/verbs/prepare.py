"""`qc.prepare`: decides how a program is quantized for a backend."""

from __future__ import annotations

from collections.abc import Sequence

from quantc import pipelines
from quantc.annotate.quantizer import Backend, Quantizer
from quantc.config.config import QuantConfig
from quantc.errors import ModeError, QuantcError, SpecError
from quantc.ir.decisions import Quantize
from quantc.ir.program import Program, Stage, check_program
from quantc.observe.trained import LEARNED
from quantc.pipeline.pipeline import Hook
from quantc.support.gc_pause import paused_collector
from quantc.targets.target import note_arithmetic


def prepare(
    program: Program,
    backend: str | Backend | Quantizer | Sequence[str | Backend | Quantizer],
    *,
    config: QuantConfig | None = None,
    allow_empty: bool = False,
    qat: bool = False,
    hooks: Sequence[Hook] = (),
) -> Program:
    """Decide how a program is quantized for a backend. The program itself is not modified.

    `backend` is a backend's name, a `Backend`, any `Quantizer`, or several of these in order of priority. `config`
    overrides the backend's defaults. The pipeline is `qc.pipelines.prepare(backend)`. It is an error if nothing would
    be quantized, unless `allow_empty`.

    With `qat` the program is prepared for quantization-aware training: it rounds like the quantized one, gradients
    pass, batch norms keep learning, and it is in training mode. It trains like any module (`prepared.parameters()`,
    `prepared(x)`, `loss.backward()`), and `qc.convert` reproduces its eval mode bit for bit. The pipeline is then
    `qc.pipelines.training(backend)`; see `qc.qat`. `hooks` are called around every pass: see `qc.hooks`.
    """
    check_program(program, "prepare", "program = qc.capture(model, example_inputs)")
    check_stage(program, Stage.ANNOTATED, "prepared")
    if qat:
        with paused_collector():
            return note_arithmetic(pipelines.training(backend, config, allow_empty).run(_to_train(program), hooks))
    if program.training:
        raise ModeError(
            f"{program.name} is in training mode",
            where="static quantization is for inference: batch norms are folded and dropout is dropped",
            advice="call program.eval() first, or capture model.eval(); to train it quantized, give qat=True",
        )
    with paused_collector():
        prepared = pipelines.prepare(backend, config, allow_empty).run_on_copy(program, hooks)
        return note_arithmetic(refuse_learned(prepared))


def _to_train(program: Program) -> Program:
    """A copy that can go to either mode, in eval mode: norms are matched as inference has them."""
    copy = program.clone()
    copy.train()
    return copy.eval()


def check_stage(program: Program, stage: Stage, done: str) -> None:
    if program.stage >= stage:
        raise QuantcError(
            f"{program.name} is already {done}",
            where=f"its stage is {program.stage.label}",
            advice="start again from the program that qc.capture gave",
        )


def refuse_learned(program: Program) -> Program:
    """The program, prepared for calibration; SpecError if a scale is to be learned, since no data can give it."""
    for group in program.plan.groups:
        if isinstance(group.outcome, Quantize) and group.outcome.spec.observe.name in LEARNED:
            raise SpecError(
                f"{group.name} is to have a learned scale ({group.outcome.spec.observe}), and nothing is trained",
                where=", ".join(map(str, group.places)),
                advice="give qc.prepare qat=True, or observe it with minmax, mse or percentile",
            )
    return program
