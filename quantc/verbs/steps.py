"""The verbs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantc import pipelines
from quantc.annotate.quantizer import Backend, Quantizer
from quantc.calibration.graph_observers import read_observers
from quantc.capture.argument_checks import check_examples, check_model
from quantc.capture.attempt import AUTO, Request, attempt
from quantc.capture.cast_model import as_dtype, cast
from quantc.capture.constant_names import name_literals
from quantc.capture.export.exported import from_exported
from quantc.capture.export.open_batch import with_open_batch
from quantc.capture.failures import first_line
from quantc.capture.mode_probe import settle_modes
from quantc.capture.model_copies import Tensors, twin
from quantc.capture.pt2.archive import load_exported
from quantc.config.config import QuantConfig
from quantc.errors import CalibrationError, CaptureError, ModeError, QuantcError, suggest
from quantc.finite import refuse_unsound
from quantc.integer.match_lowering import MultiplierForm
from quantc.integer.proof.range_reduction import RangeReduction
from quantc.ir.plan import Source
from quantc.ir.program import LogEntry, Program, Stage, check_program
from quantc.ir.signature import tensors_in_place_of_arrays
from quantc.passes.canonicalize import Canonicalize
from quantc.passes.remove_fake_quantize import RemoveFakeQuantize
from quantc.pipeline.pipeline import Pipeline
from quantc.pipelines import Style
from quantc.qat.learned import refuse_learned
from quantc.support.gc_pause import paused_collector
from quantc.targets.provenance import check_has_plan

Method = Literal["auto", "export", "export-strict", "fx"]
METHODS: tuple[Method, ...] = ("auto", "export", "export-strict", "fx")


def capture(
    model: nn.Module | ExportedProgram | str | os.PathLike[str],
    example_inputs: tuple[Any, ...] | None = None,
    method: Method = "auto",
    *,
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = AUTO,
    dtype: str | torch.dtype | None = None,
    leaf: str | type[nn.Module] | Iterable[str | type[nn.Module]] = (),
) -> Program:
    """Capture a model as a Program in the canonical dialect.

    `model` is a module, an `ExportedProgram`, or the path of a `.pt2` file. `method` is "export" (torch.export),
    "export-strict", "fx" (symbolic tracing; the only one that works without example inputs or with leaves), or
    "auto": export, then fx; `program.log` says which it was and why. `leaf` names modules, or gives classes of modules,
    that stay whole. The model itself is never changed.

    With `dynamic_shapes="auto"` the batch is open, which is the first dimension if all example inputs share it, where the
    model allows it; the log says so, or why it is fixed. All other sizes are those of the example inputs. None fixes them
    all, and what torch.export takes says which are open. `dtype="float32"` captures a copy of a model in other floats, cast
    to float32, which alone is quantized. Example inputs may be NumPy arrays.
    """
    start = time.perf_counter()
    args = () if example_inputs is None and example_kwargs else example_inputs
    args, kwargs = tensors_in_place_of_arrays((args, example_kwargs or {}))
    notes: list[str] = []
    if dtype is not None and isinstance(model, nn.Module):
        check_model(model)
        check_examples(model, args, kwargs)
        model, args, kwargs, note = cast(model, args, kwargs, as_dtype(dtype))
        notes.append(note)
    program, found = _captured(model, method, Request(args, kwargs, dynamic_shapes, _leaves(leaf)))
    notes += found
    program.log.insert(0, LogEntry(f"capture ({program.method})", time.perf_counter() - start, True, tuple(notes)))
    return program


def _canonical(program: Program) -> Program:
    Pipeline((Canonicalize(),)).run(program)
    name_literals(program)
    return program


def _captured(model: Any, method: Method, request: Request) -> tuple[Program, list[str]]:
    if method not in METHODS:
        raise CaptureError(
            f"there is no capture method {method!r}",
            where=f"method={method!r}",
            advice=suggest(str(method), METHODS, noun="methods"),
        )
    if isinstance(model, str | os.PathLike):
        program = _with_examples(from_exported(load_exported(model), name=_stem(model)), None)
        return _canonical(program), [f"read from {os.fspath(model)}"]
    if isinstance(model, ExportedProgram):
        program = _with_examples(from_exported(model), model.example_inputs)
        return _canonical(program), ["given as an ExportedProgram"]
    check_model(model)
    check_examples(model, request.args, request.kwargs)
    if request.args is None and not (request.dynamic_shapes is None or request.is_auto):
        raise CaptureError(
            "dynamic_shapes was given without example inputs",
            where="dynamic_shapes",
            advice="give example_inputs too, or leave dynamic_shapes out: without example inputs every size is dynamic",
        )
    chosen, reason = _choose(method, request)
    notes = [reason] if reason else []
    if chosen != "auto":
        program, found = _followed(chosen, model, request)
        return program, [*notes, *found]
    try:
        return _followed("export", model, request)
    except CaptureError as failed_export:
        try:
            program, found = _followed("fx", model, request)
        except CaptureError as failed_trace:
            raise _both_failed(failed_export, failed_trace) from failed_trace
        return program, [f"export failed, so fx: {first_line(failed_export)}", *found]


def _followed(method: str, model: nn.Module, request: Request) -> tuple[Program, list[str]]:
    """The canonical program by one method, and notes for its log. Which sizes are open, if that was left to capture, is
    what the model allows."""
    if not request.is_auto:
        return _settled(method, model, request)
    if request.args is None:
        return _settled(method, model, replace(request, dynamic_shapes=None))
    return with_open_batch(model, request, partial(_settled, method, model))


def _settled(method: str, model: nn.Module, request: Request) -> tuple[Program, list[str]]:
    """One attempt, in the canonical dialect. Which arguments follow the model's mode is found by capturing it in the
    other one, where that is needed."""
    program, notes = attempt(method, model, request)
    _with_examples(program, (request.args, request.kwargs) if request.args is not None else None)
    _canonical(program)

    def recapture() -> Program:
        return _canonical(attempt(method, twin(model, Tensors.SHARED).train(not program.training), request)[0])

    try:
        settle_modes(program, model, recapture)
    except CaptureError as error:
        program.fixed_mode = f"it could not be captured in the other mode ({first_line(error)})"
    return program, notes


def _choose(method: Method, request: Request) -> tuple[Method, str]:
    if method == "auto" and request.args is None:
        return "fx", "fx, because there are no example inputs"
    if method == "auto" and request.leaf:
        return "fx", "fx, because export cannot keep modules whole"
    if method in ("export", "export-strict") and request.args is None:
        raise CaptureError(
            "export needs example inputs", where="example_inputs", advice="pass example_inputs, or use method='fx'"
        )
    if method in ("export", "export-strict") and request.leaf:
        raise CaptureError("export cannot keep modules whole", where="leaf", advice="use method='fx' with leaf=")
    return method, ""


def _leaves(leaf: Any) -> tuple[Any, ...]:
    return (leaf,) if isinstance(leaf, str | type) or not isinstance(leaf, Iterable) else tuple(leaf)


def _both_failed(export_error: CaptureError, trace_error: CaptureError) -> CaptureError:
    if export_error.what == trace_error.what:
        return export_error
    return CaptureError(
        f"{export_error.what}; and {trace_error.what}",
        where=trace_error.where or export_error.where,
        advice=export_error.advice,
    )


def _with_examples(program: Program, examples: tuple[tuple[Any, ...], dict[str, Any]] | None) -> Program:
    if examples is not None:
        program.example_inputs = tuple(pytree.tree_leaves(examples))
    return program


def _stem(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(os.path.basename(os.fspath(path)))[0]


# -- prepare, convert ------------------------------------------------------------------------------------------


def prepare(
    program: Program,
    backend: str | Backend | Quantizer | Sequence[str | Backend | Quantizer],
    *,
    config: QuantConfig | None = None,
    allow_empty: bool = False,
    qat: bool = False,
) -> Program:
    """Decide how a program is quantized for a backend. The program itself is not changed.

    `backend` is a backend's name, a `Backend`, any `Quantizer`, or several of these, the first of which has the first
    choice. `config` says what is to be done otherwise than the backend has it. The pipeline this runs is
    `qc.pipelines.prepare(backend)`. Nothing quantized is an error unless `allow_empty`.

    With `qat` the program is prepared to be trained: it rounds as the quantized one will, gradients pass, batch norms
    learn on, and it comes in training mode. It trains like any module (`prepared.parameters()`, `prepared(x)`,
    `loss.backward()`), and `qc.convert` makes of it what it was in eval mode, bit for bit. The pipeline is then
    `qc.pipelines.training(backend)`; see `qc.qat`.
    """
    check_program(program, "prepare", "program = qc.capture(model, example_inputs)")
    _check_stage(program, Stage.ANNOTATED, "prepared")
    if qat:
        with paused_collector():
            return pipelines.training(backend, config, allow_empty).run(_to_train(program))
    if program.training:
        raise ModeError(
            f"{program.name} is in training mode",
            where="static quantization is for inference: batch norms are folded and dropout is dropped",
            advice="call program.eval() first, or capture model.eval(); to train it quantized, give qat=True",
        )
    with paused_collector():
        return refuse_learned(pipelines.prepare(backend, config, allow_empty).run_on_copy(program))


def _to_train(program: Program) -> Program:
    """A copy that can go to either mode, in eval mode: norms are matched as inference has them."""
    copy = program.clone()
    copy.train()
    return copy.eval()


Form = Literal["qdq", "integer"]
FORMS: tuple[Form, ...] = ("qdq", "integer")


def check_form(to: str) -> None:
    """Refuse a form that there is not."""
    if to not in FORMS:
        raise QuantcError(f"there is no form {to!r}", where=f"to={to!r}", advice=suggest(str(to), FORMS, noun="forms"))


def convert(
    prepared: Program,
    to: Form = "qdq",
    *,
    multiplier: MultiplierForm = "float64",
    style: Style = "fused",
    reduce_range: RangeReduction = "auto",
) -> Program:
    """Carry out what was prepared and calibrated: the program in Q/DQ form, weights stored quantized.

    `to="integer"` goes on to integer arithmetic: exact sums, and one rounding onto the grid of each result.
    `multiplier="fixed"` has that rounding done with a 32-bit mantissa and a shift, as hardware does it.
    `style="decomposed"` writes it in ATen primitives, where "fused" has ops of its own, `torch.ops.quantc`.

    Where two products could leave the 16 bits in which the backend's instruction set adds them, ranges are made narrower
    by as little as makes it impossible, and the log says where. `reduce_range="weights"` raises the weight scales of the
    channels that could, "activations" lowers the largest activation, "auto" is weights unless they cannot be coarser.
    With "no" nothing is changed, and `program.coverage()` says what could happen.

    The prepared program is not changed and can be calibrated further. The pipelines this runs are
    `qc.pipelines.convert()` and `qc.pipelines.integer()`.
    """
    check_form(to)
    integer = pipelines.integer(multiplier, style)
    if to == "qdq" and (multiplier, style) != ("float64", "fused"):
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
    _check_stage(prepared, Stage.QUANTIZED, "converted")
    check_has_plan(prepared, "convert")
    with paused_collector():
        converted = _converted(prepared, reduce_range)
        return integer.run(converted) if to == "integer" else converted


def _converted(prepared: Program, reduce_range: RangeReduction) -> Program:
    pipeline = pipelines.convert(prepared.plan.quantizer, reduce_range)
    copy = prepared.draft()
    if copy.is_live:
        refuse_unsound(copy)
        return Pipeline((RemoveFakeQuantize(),)).then(pipeline).run(copy)
    read_observers(copy)
    if not any(group.source is Source.DATA for group in copy.plan.groups):
        copy.stage = max(copy.stage, Stage.CALIBRATED)  # weights alone need no data
    if copy.stage < Stage.CALIBRATED:
        raise CalibrationError(
            f"{prepared.name} was not calibrated",
            where=f"its stage is {prepared.stage.label}",
            advice="call qc.calibrate(prepared, batches) first",
        )
    return pipeline.run(copy)


def _check_stage(program: Program, stage: Stage, done: str) -> None:
    if program.stage >= stage:
        raise QuantcError(
            f"{program.name} is already {done}",
            where=f"its stage is {program.stage.label}",
            advice="start again from the program that qc.capture gave",
        )
