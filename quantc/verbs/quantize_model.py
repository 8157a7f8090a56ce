"""`qc.quantize`: capture, prepare, calibrate and convert in one call, with a report."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from quantc import pipelines
from quantc.annotate.quantizer import Backend, Quantizer, mode_config, quantizer_of
from quantc.calibration.layer_inputs import layer_inputs
from quantc.calibration.loop import calibrate
from quantc.capture.capture_request import AUTO
from quantc.capture.cast_model import as_dtype
from quantc.config.config import QuantConfig
from quantc.errors import CalibrationError, InputError, ModeError, PipelineError, UnknownNameError, suggest
from quantc.inspect.comparison import Comparison
from quantc.inspect.held_out import Outside, outside, sound, split_held_out
from quantc.inspect.recovery_report import RecoveryReport
from quantc.inspect.report import MeasuredOn, Report, Step
from quantc.inspect.size import size_and_file
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.batch_inputs import Inputs, are_lasting, batch_of, check_batches, select_inputs
from quantc.ir.plan import Source
from quantc.ir.program import Program
from quantc.pipeline.pipeline import Hook, Pass, Pipeline, hooks_of
from quantc.recover.fitting import FittingPass
from quantc.recover.judging_batches import MOST as JUDGING
from quantc.recover.judging_batches import judging_on
from quantc.spec.arithmetic import MultiplierChoice
from quantc.support.progress import Style
from quantc.verbs.capture import Method, capture
from quantc.verbs.compare import compare
from quantc.verbs.convert import Form, check_form, convert
from quantc.verbs.prepare import prepare
from quantc.verbs.recover import recover as fit_weights

Mode = Literal["static", "dynamic", "weight-only"]
MODES = ("static", "dynamic", "weight-only")
Recover = bool | str | Pipeline
"""True to fit weights, False to round to nearest; or the passes that fit: a pipeline, or its text."""
CHEAP = "correct-bias"
"""The passes that pay for less than the time of the calibration: means are collected beside ranges."""
KEPT = 2
"""Number of batches kept for measuring the outcome."""


@dataclass(frozen=True)
class Result:
    """Result of `qc.quantize`. Called like the model."""

    program: Program
    """The quantized program, in the form that was asked for."""
    prepared: Program
    """The plan with its statistics: can be calibrated further and converted again."""
    captured: Program
    """The float program."""
    report: Report
    """Coverage, accuracy and size; prints as text, `to_json()` is for machines."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.program(*args, **kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the quantized program to a file that `qc.load` reads."""
        self.program.save(path)


def quantize(
    model: nn.Module | ExportedProgram | Program | str | os.PathLike[str],
    example_inputs: tuple[Any, ...] | None,
    batches: Iterable[Any] | None = None,
    backend: str | Backend | Quantizer | Sequence[str | Backend | Quantizer] = "x86",
    *,
    config: QuantConfig | None = None,
    mode: Mode = "static",
    to: Form = "qdq",
    multiplier: MultiplierChoice = "target",
    style: pipelines.Style = "fused",
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = AUTO,
    inputs: Inputs | None = None,
    dtype: str | torch.dtype | None = None,
    leaf: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
    method: Method = "auto",
    allow_empty: bool = False,
    reduce_range: RangeReduction = "auto",
    held_out: int | Iterable[Any] | None = None,
    recover: Recover | None = False,
    hooks: Sequence[Hook] = (),
) -> Result:
    """Quantize a model for a backend: capture, prepare, calibrate, convert.

    `model`, `example_inputs`, `example_kwargs`, `dynamic_shapes`, `dtype`, `leaf` and `method` are as in `qc.capture`;
    a captured Program is accepted as well. `batches` is any iterable of calibration batches, each a tensor or a tuple
    of the model's inputs; it is consumed once. Where batches hold more, such as labels, `inputs` selects the model's
    inputs, as in `qc.calibrate`: `inputs=0`. With `dtype` they are cast like the model. `to`, the form of the result,
    `multiplier`, `style` and `reduce_range` are those of `qc.convert`.

    `mode` is the backend's technique where `config` does not decide: "static" finds scales from the batches; "dynamic"
    finds those of activations at run time; "weight-only" stores weights quantized and computes in float. The last two
    need no batches; the result is measured on the example inputs then. The model itself is not modified.

    `held_out` are batches that calibration does not see, to measure the result on: separate batches, or how many of the
    last of `batches`. Without it, the first batches are measured on, and the report says that calibration saw them. A
    bad result is a warning: see `result.report.warnings`.

    `recover` fits weights to what their layers read, as `qc.recover` does: True for all of its passes, or pipeline text.
    It takes batches in every mode, at least two; transforms such as `equalize` see them again, so give them as a list or the
    like. With None, biases take up the mean error where the mode calibrates: `correct-bias`, from means alone, for less
    than the time of the calibration. `hooks` are called around every pass of `prepare` and `convert`.
    """
    _check_mode(mode)
    check_form(to)
    hooks = hooks_of(hooks)
    steps = Steps()
    converting = {"to": to, "multiplier": multiplier, "style": style, "reduce_range": reduce_range}
    rest: Any = {
        "steps": steps,
        "config": config,
        "mode": mode,
        "allow_empty": allow_empty,
        "held_out": held_out,
        "recover": recover,
        "hooks": hooks,
    }
    rest = {**rest, **converting}
    if batches is not None:
        check_batches(batches)
    if isinstance(model, Program):
        _check_no_examples(example_inputs)
        _check_no_cast(dtype)
        _check_no_leaf(leaf)
        captured = model
    else:
        with steps("capture"):
            captured = capture(
                model,
                example_inputs,
                method,
                example_kwargs=example_kwargs,
                dynamic_shapes=dynamic_shapes,
                dtype=dtype,
                leaf=leaf,
            )
    cast_to = None if dtype is None else as_dtype(dtype)
    if batches is not None:
        batches = select_inputs(batches, inputs, captured, cast_to)
    if held_out is not None and not isinstance(held_out, int):
        check_batches(held_out)
        rest["held_out"] = select_inputs(held_out, inputs, captured, cast_to)
    return _warn(quantize_program(captured, batches, backend, **rest))


def _warn(result: Result) -> Result:
    """The result, with a warning if it is bad."""
    for text in result.report.warnings:
        warnings.warn(f"{result.report.name}: {text}", stacklevel=3)
    return result


@dataclass
class Steps:
    """Durations of the steps; `begun` is called when one starts."""

    begun: Callable[[str], None] = lambda name: None
    done: list[Step] = field(default_factory=list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.begun(name)
        start = time.perf_counter()
        yield
        self.done.append(Step(name, time.perf_counter() - start))


def quantize_program(
    captured: Program,
    batches: Iterable[Any] | None,
    backend: str | Backend | Quantizer | Sequence[str | Backend | Quantizer],
    *,
    steps: Steps,
    config: QuantConfig | None = None,
    mode: Mode = "static",
    allow_empty: bool = False,
    to: Form = "qdq",
    multiplier: MultiplierChoice = "target",
    style: pipelines.Style = "fused",
    reduce_range: RangeReduction = "auto",
    progress: Style = "auto",
    held_out: int | Iterable[Any] | None = None,
    recover: Recover | None = False,
    hooks: Sequence[Hook] = (),
) -> Result:
    """The steps after capture."""
    if batches is not None:
        check_batches(batches)
    is_lasting = batches is not None and are_lasting(batches)
    batches, kept = split_held_out(batches, held_out)
    _check_inference(captured)
    quantizer = quantizer_of(backend)
    if mode != "static":
        config = mode_config(quantizer, mode) + (config if config is not None else QuantConfig())
    with steps("prepare"):
        prepared = prepare(captured, quantizer, config=config, allow_empty=allow_empty, hooks=hooks)
    calibration, measured, watched = None, _examples(captured), _Watched((), 0)
    measured_on: MeasuredOn = "example inputs" if batches is None and kept is None else "batches"
    is_held_out = True
    fitting = _fitting(recover, prepared, reduce_range)
    if _waiting(prepared) or fitting is not None:
        collected = _collected_for(fitting)
        watched = _Watched(_check_given(batches, prepared, recover), JUDGING if collected == "recover" else KEPT)
        with steps("calibrate"):
            calibration = calibrate(prepared, watched, progress=progress, collect=collected)
        measured, is_held_out = watched.first[:KEPT], False
    elif batches is not None and kept is None:
        measured = list(islice(batches, KEPT))
    far: tuple[Outside, ...] = ()
    if kept is not None:
        measured, is_held_out = sound(kept, captured), True
        far = outside(prepared, measured) if calibration is not None else ()
    if fitting is not None:
        with steps("recover"), judging_on(watched.first):
            again = batches if is_lasting else None
            prepared = fit_weights(prepared, fitting, batches=again, progress=progress, hooks=hooks)
    with steps("convert"):
        program = convert(prepared, to, multiplier=multiplier, style=style, reduce_range=reduce_range, hooks=hooks)
    with steps("compare"):
        coverage, comparison = prepared.coverage(), _compare(prepared, program, measured)
        if to == "integer" and comparison is not None:
            # per-op errors are reported for the Q/DQ form, whose ops are those of the float program
            in_float = compare(prepared, convert(prepared, reduce_range=reduce_range), measured)
            notes = (*comparison.notes, "what each op costs was measured in Q/DQ form")
            coverage, comparison = program.coverage(), replace(comparison, layers=in_float.layers, notes=notes)
    report = Report(
        name=captured.name,
        backend=coverage.quantizer,
        form=to,
        coverage=coverage,
        calibration=calibration,
        comparison=comparison,
        size=size_and_file(captured, program),
        steps=tuple(steps.done),
        log=tuple(program.log),
        measured_on=measured_on,
        is_held_out=is_held_out,
        outside=far,
        recovery=RecoveryReport.of(prepared.log) if fitting is not None else None,
    )
    return Result(program, prepared, captured, report)


def _waiting(prepared: Program) -> list[str]:
    """The groups whose scales come from data."""
    return [group.name for group in prepared.plan.groups if group.source is Source.DATA]


def _fitting(recover: Recover | None, prepared: Program, reduce_range: RangeReduction) -> Pipeline | None:
    """The passes that fit weights to the scales that `convert` will have; None if none do."""
    if recover is False or (recover is None and not (_waiting(prepared) and layer_inputs(prepared))):
        return None
    if isinstance(recover, Pipeline):
        found = recover
    elif recover is True or recover == "auto":
        found = pipelines.recover()
    else:
        found = Pipeline.of(CHEAP if recover is None else recover)
        if not len(found):
            raise PipelineError(
                "no passes are named to win back accuracy with",
                where=f"recover={recover!r}",
                advice="name some, as in rescale,round,correct-bias; or leave them out for all that there are",
            )
    return Pipeline(tuple(_for(step, reduce_range) for step in found))


def _for(step: Pass, reduce_range: RangeReduction) -> Pass:
    is_open = "reduce_range" in type(step).model_fields and "reduce_range" not in step.model_fields_set
    return step.model_copy(update={"reduce_range": reduce_range}) if is_open else step


def _collected_for(fitting: Pipeline | None) -> str | None:
    """The statistics that passes need: means alone are cheap."""
    if fitting is None:
        return None
    needed = {step.statistics if isinstance(step, FittingPass) else "recover" for step in fitting}
    return needed.pop() if len(needed) == 1 else "recover"


def _check_given(batches: Iterable[Any] | None, prepared: Program, recover: Recover | None) -> Iterable[Any]:
    if batches is not None:
        return batches
    if recover:
        raise CalibrationError(
            "no batches were given, and weights are fitted to what their layers read",
            where=f"qc.quantize(recover={recover!r})",
            advice="give batches of inputs, at least two; or leave out recover=",
        )
    waiting = _waiting(prepared)
    shown = ", ".join(waiting[:3]) + (f" and {len(waiting) - 3} more" if len(waiting) > 3 else "")
    raise CalibrationError(
        f"no batches were given, and the scales of {shown} come from data",
        where="qc.quantize",
        advice='give batches of inputs; mode="dynamic" and mode="weight-only" need none, unless the config asks for more',
    )


def _examples(captured: Program) -> list[Any]:
    """The inputs the model was captured with, as a batch."""
    return [] if captured.example_inputs is None else [batch_of(captured, captured.example_inputs)]


def _compare(prepared: Program, program: Program, measured: list[Any]) -> Comparison | None:
    """The outcome against the float program; None where there is nothing to run them on."""
    return compare(prepared, program, measured) if measured else None


class _Watched:
    """Batches on their way to the calibration, of which the first are kept: what gives them once is not asked twice."""

    def __init__(self, batches: Iterable[Any], kept: int) -> None:
        self.batches, self.kept = batches, kept
        self.first: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if len(self.first) < self.kept:
                self.first.append(batch)
            yield batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # TypeError where the length is not known, as len() has it


def _check_inference(captured: Program) -> None:
    """Dropout that still drops, or a batch norm that still learns, is no model to take the numbers of."""
    if captured.training:
        raise ModeError(
            f"{captured.name} is in training mode",
            where="qc.quantize",
            advice="call model.eval() first, or program.eval() on what was captured",
        )


def _check_no_examples(given: Any) -> None:
    """Refuse a value in place of example inputs beside a Program, which would be ignored: most likely it is a backend."""
    if given is not None and not isinstance(given, tuple):
        raise InputError(
            f"the second argument is a {type(given).__name__}, and a Program needs no example inputs",
            where="qc.quantize",
            advice="write qc.quantize(program, None, batches, backend=...)",
        )


def _check_no_cast(dtype: Any) -> None:
    if dtype is not None:
        raise InputError(
            "dtype is for models, and a Program was given",
            where=f"dtype={dtype!r}",
            advice='write qc.capture(model, example_inputs, dtype="float32") first',
        )


def _check_no_leaf(leaf: Any) -> None:
    if leaf != ():
        raise InputError(
            "leaf is for models, and a Program was given",
            where=f"leaf={leaf!r}",
            advice="write qc.capture(model, example_inputs, leaf=...) first",
        )


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UnknownNameError(
            f"unknown mode {mode!r}", where=f"mode={mode!r}", advice=suggest(mode, MODES, noun="modes")
        )
