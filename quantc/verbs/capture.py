"""`qc.capture`: a model as a Program, by the first capture method that works."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantc.capture.argument_checks import check_examples, check_model
from quantc.capture.capture_attempt import attempt
from quantc.capture.capture_request import AUTO, Request
from quantc.capture.cast_model import as_dtype, cast
from quantc.capture.constant_names import name_literals
from quantc.capture.export.exported import from_exported
from quantc.capture.export.open_batch import with_open_batch
from quantc.capture.failures import first_line
from quantc.capture.mode_probe import settle_modes
from quantc.capture.model_copies import Tensors, twin
from quantc.capture.pt2.archive import load_exported
from quantc.errors import CaptureError, suggest
from quantc.ir.program import LogEntry, Program
from quantc.ir.signature import tensors_in_place_of_arrays
from quantc.passes.canonicalize import Canonicalize
from quantc.pipeline.pipeline import Pipeline

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
    "export-strict", "fx" (symbolic tracing; the only one that works without example inputs or with leaves), or "auto":
    export, then fx; `program.log` says which was used and why. `leaf` names modules, or gives module classes, that are
    not traced into. The model itself is never modified.

    With `dynamic_shapes="auto"` the batch dimension is dynamic where the model allows it: the first dimension if all
    example inputs share it; the log says so, or why it is static. All other sizes are those of the example inputs. None
    makes all static; dynamic shapes as torch.export takes them are passed through. `dtype="float32"` captures a copy of
    a model in another float dtype, cast to float32: only float32 is quantized. Example inputs may be NumPy arrays.
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
    program, found = _capture_program(model, method, Request(args, kwargs, dynamic_shapes, _leaves(leaf)))
    notes += found
    program.log.insert(0, LogEntry(f"capture ({program.method})", time.perf_counter() - start, True, tuple(notes)))
    return program


def _canonical(program: Program) -> Program:
    Pipeline((Canonicalize(),)).run(program)
    name_literals(program)
    return program


def _capture_program(model: Any, method: Method, request: Request) -> tuple[Program, list[str]]:
    if method not in METHODS:
        raise CaptureError(
            f"unknown capture method {method!r}",
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
        program, found = _capture_sizes(chosen, model, request)
        return program, [*notes, *found]
    try:
        return _capture_sizes("export", model, request)
    except CaptureError as failed_export:
        try:
            program, found = _capture_sizes("fx", model, request)
        except CaptureError as failed_trace:
            raise _both_failed(failed_export, failed_trace) from failed_trace
        return program, [f"export failed, so fx: {first_line(failed_export)}", *found]


def _capture_sizes(method: str, model: nn.Module, request: Request) -> tuple[Program, list[str]]:
    """The canonical program by one method, and notes for its log. Which sizes are open, if that was left to capture, is
    what the model allows."""
    if not request.is_auto:
        return _capture_once(method, model, request)
    if request.args is None:
        return _capture_once(method, model, replace(request, dynamic_shapes=None))
    return with_open_batch(model, request, partial(_capture_once, method, model))


def _capture_once(method: str, model: nn.Module, request: Request) -> tuple[Program, list[str]]:
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
