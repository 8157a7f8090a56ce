"""One capture attempt by one method, from a copy, without side effects outside the model."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from quantc.capture.capture_request import Request
from quantc.capture.export.exported import export
from quantc.capture.failures import explain_failure, refuse_wrong_dtypes
from quantc.capture.leaf_modules import leaf_selector
from quantc.capture.model_copies import Tensors, cloned_inputs, twin
from quantc.capture.rebinding import data_kept
from quantc.capture.refused_trace import RefusedError
from quantc.capture.source_lines import forward_line
from quantc.capture.statefulness import depends_on_earlier_calls, keep_attributes, watch
from quantc.capture.symbolic.interception import seeds_refused
from quantc.capture.symbolic.symbolic_capture import trace
from quantc.errors import CaptureError, QuantcError
from quantc.ir.program import Program


def attempt(method: str, model: nn.Module, request: Request) -> tuple[Program, list[str]]:
    """The program and notes for its log; a CaptureError if `method` cannot capture the model."""
    leaves = leaf_selector(model, request.leaf)
    args, kwargs, shapes = request.args, request.kwargs, request.dynamic_shapes
    if method != "fx":
        _refuse_scripted(model)
    with keep_attributes(model):
        copied = twin(model, Tensors.SHARED)
        changed = watch(copied) if method != "export-strict" else _attributes_a_run_changes(model, args, kwargs)
        try:
            with _surroundings_kept(), seeds_refused(), data_kept() if method != "export-strict" else nullcontext():
                if method == "fx":
                    program = trace(copied, args, kwargs, dynamic_shapes=shapes, leaves=leaves)
                else:
                    program = export(copied, args or (), kwargs, dynamic_shapes=shapes, strictness=_strictness(method))
        except QuantcError:
            raise
        except Exception as error:
            raise explain_failure(error, method, model, args, kwargs) from error
        refuse_wrong_dtypes(program, model, args, kwargs)
        return program, _notes_on_state(model, args, kwargs, changed)


def _refuse_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{name!r} is a TorchScript module, which torch.export cannot follow",
                where=f"module {name!r} of {type(model).__name__}",
                advice="use method='fx', which keeps it whole, or put the nn.Module it was scripted from in its place",
            )


def _attributes_a_run_changes(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> list[str]:
    """The attributes that a call changes, where the model cannot be watched while it is captured."""
    runnable = twin(model, Tensors.COPIED)
    changed = watch(runnable)
    with suppress(Exception), torch.no_grad(), torch.random.fork_rng(devices=[]):  # capture reports its errors
        given, named = cloned_inputs((args, kwargs))
        runnable(*given, **named)
    return changed


def _strictness(method: str) -> str:
    return "strict" if method == "export-strict" else "non-strict"


@contextmanager
def _surroundings_kept() -> Iterator[None]:
    """Disable the caller's autocast during capture, and refuse a model that draws random numbers while it is traced.

    Tracing computes nothing, so a generator that advanced was used by Python code: the drawn number would be a constant
    of the program.
    """
    with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
        before = _generators()
        state, numbers = torch.get_rng_state(), random.getstate()
        yield
        if not torch.equal(state, torch.get_rng_state()) or before != _generators():
            random.setstate(numbers)
            raise RefusedError(
                "forward uses a random generator from Python (a seed, random.random(), numpy.random), "
                "so the program would repeat one draw for ever"
            )


def _generators() -> tuple[Any, ...]:
    """The states of the generators of Python and, if it is there, numpy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else repr(numpy.random.get_state(legacy=False))


def _notes_on_state(model: nn.Module, args: Any, kwargs: dict[str, Any], changed: list[str]) -> list[str]:
    if not changed:
        return []
    names = ", ".join(f"self.{name}" for name in changed[:4])
    if args is None:
        return [f"forward changes {names}; whether results depend on it was not checked, for want of example inputs"]
    if not depends_on_earlier_calls(model, args, kwargs):
        return [f"forward changes {names}, which its results do not depend on"]
    raise CaptureError(
        f"results of {type(model).__name__} depend on what earlier calls left in {names}",
        where=forward_line(model),
        advice="keep state in a buffer (register_buffer), which a program can hold; "
        "or keep the module that has it opaque with leaf=(its name or class,) and method='fx'",
    )
