"""The verbs."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from quantc.capture.archive import load_exported
from quantc.capture.exported import export, from_exported
from quantc.capture.failures import explain_failure, first_line
from quantc.capture.literals import name_literals
from quantc.capture.symbolic import leaf_selector, trace
from quantc.errors import CaptureError, QuantcError, suggest
from quantc.passes.canonicalize import Canonicalize
from quantc.pipeline import Pipeline
from quantc.program import LogEntry, Program

Method = Literal["auto", "export", "export-strict", "fx"]
METHODS: tuple[Method, ...] = ("auto", "export", "export-strict", "fx")


def capture(
    model: nn.Module | ExportedProgram | str | os.PathLike[str],
    example_inputs: tuple[Any, ...] | None = None,
    method: Method = "auto",
    *,
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    leaf: Iterable[str | type[nn.Module]] = (),
) -> Program:
    """Capture a model as a Program in the canonical dialect.

    `model` is a module, an `ExportedProgram`, or the path of a `.pt2` file. `method` is "export" (torch.export),
    "export-strict", "fx" (symbolic tracing; the only one that works without example inputs or with leaves), or
    "auto": export, then fx; `program.log` says which it was and why. Sizes are fixed to those of the example inputs
    except where `dynamic_shapes` (as torch.export takes it) says otherwise. `leaf` names modules, or gives classes
    of modules, that stay whole. The model itself is never changed.
    """
    start = time.perf_counter()
    program, notes = _captured(model, example_inputs, method, example_kwargs or {}, dynamic_shapes, tuple(leaf))
    program.log.append(LogEntry(f"capture ({program.method})", time.perf_counter() - start, True, tuple(notes)))
    Pipeline((Canonicalize(),)).run(program)
    name_literals(program)
    return program


def _captured(
    model: Any,
    args: tuple[Any, ...] | None,
    method: Method,
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    leaf: tuple[Any, ...],
) -> tuple[Program, list[str]]:
    if method not in METHODS:
        raise CaptureError(f"there is no capture method {method!r}", advice=suggest(method, METHODS, noun="methods"))
    if isinstance(model, str | os.PathLike):
        return _with_examples(from_exported(load_exported(model), name=_stem(model)), None), [
            f"read from {os.fspath(model)}"
        ]
    if isinstance(model, ExportedProgram):
        return _with_examples(from_exported(model), model.example_inputs), ["given as an ExportedProgram"]
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes a torch.nn.Module, an ExportedProgram or the path of a .pt2 file, not a {type(model).__name__}",
            advice="wrap a function in a module's forward",
        )
    if args is not None and not isinstance(args, tuple):
        raise CaptureError(
            f"example_inputs is a {type(args).__name__}",
            advice="pass a tuple of positional arguments, even for one input: (x,)",
        )
    chosen, reason = _choose(args, method, leaf)
    notes = [reason] if reason else []
    if chosen != "auto":
        program = _by(chosen, model, args, kwargs, dynamic_shapes, leaf)
    else:
        try:
            program = _by("export", model, args, kwargs, dynamic_shapes, leaf)
        except CaptureError as failed_export:
            try:
                program = _by("fx", model, args, kwargs, dynamic_shapes, leaf)
            except CaptureError as failed_trace:
                raise _both_failed(failed_export, failed_trace) from failed_trace
            notes.append(f"export failed, so fx: {first_line(failed_export)}")
    return _with_examples(program, (args, kwargs) if args is not None else None), notes


def _choose(args: tuple[Any, ...] | None, method: Method, leaf: tuple[Any, ...]) -> tuple[Method, str]:
    if method == "auto" and args is None:
        return "fx", "fx, because there are no example inputs"
    if method == "auto" and leaf:
        return "fx", "fx, because export cannot keep modules whole"
    if method in ("export", "export-strict") and args is None:
        raise CaptureError("export needs example inputs", advice="pass example_inputs, or use method='fx'")
    if method in ("export", "export-strict") and leaf:
        raise CaptureError("export cannot keep modules whole", advice="use method='fx' with leaf=")
    return method, ""


def _by(
    method: Method,
    model: nn.Module,
    args: tuple[Any, ...] | None,
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    leaf: tuple[Any, ...],
) -> Program:
    leaves = leaf_selector(model, leaf)
    twin = structural_copy(model)
    try:
        if method == "fx":
            return trace(twin, args, kwargs, dynamic_shapes=dynamic_shapes, leaves=leaves)
        strictness = "strict" if method == "export-strict" else "non-strict"
        return export(twin, args or (), kwargs, dynamic_shapes=dynamic_shapes, strictness=strictness)
    except QuantcError:
        raise
    except Exception as error:
        raise explain_failure(error, method, model, args, kwargs) from error


def _both_failed(export_error: CaptureError, trace_error: CaptureError) -> CaptureError:
    if export_error.what == trace_error.what:
        return export_error
    return CaptureError(
        f"{export_error.what}; and {trace_error.what}",
        where=trace_error.where or export_error.where,
        advice=export_error.advice,
    )


def structural_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules that shares their tensors: what `forward` assigns to `self` stays in the copy."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [
        value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)
    ]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors}
    return copy.deepcopy(model, memo)


def _with_examples(program: Program, examples: tuple[tuple[Any, ...], dict[str, Any]] | None) -> Program:
    if examples is not None:
        program.example_inputs = tuple(pytree.tree_leaves(examples))
    return program


def _stem(path: str | os.PathLike[str]) -> str:
    return os.path.splitext(os.path.basename(os.fspath(path)))[0]
