"""Argument checks of capture, before anything is traced."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from quantc.capture.source_lines import forward_line
from quantc.errors import CaptureError, suggest


def check_model(model: Any) -> None:
    """Refuse models that cannot be captured at all: scripted ones, and those with uninitialized parameters."""
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"capture takes a torch.nn.Module, an ExportedProgram or the path of a .pt2 file, not a {type(model).__name__}",
            where="the first argument of capture",
            advice="wrap a function in a module's forward",
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{getattr(model, 'original_name', type(model).__name__)} is a TorchScript module, "
            "which has no Python code to follow",
            where="the first argument of capture",
            advice="capture the nn.Module it was scripted from; a scripted submodule can stay whole in a larger model",
        )
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(parameter):
            raise CaptureError(
                f"{name!r} of {type(model).__name__} is lazy, and has not been given a shape",
                where=f"parameter {name!r}",
                advice="run the model once on real inputs before capturing it",
            )


def check_examples(model: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse example inputs that `forward` cannot be called with."""
    if args is not None and not isinstance(args, tuple):
        raise CaptureError(
            f"example_inputs is a {type(args).__name__}",
            where="example_inputs",
            advice="give arguments by name as example_kwargs=, and a dict that is one argument in a tuple: (batch,)"
            if isinstance(args, Mapping)
            else "pass a tuple of positional arguments, even for one input: (x,)",
        )
    if not isinstance(kwargs, Mapping):
        raise CaptureError(
            f"example_kwargs is a {type(kwargs).__name__}",
            where="example_kwargs",
            advice="pass a dict of keyword arguments: {'mask': mask}",
        )
    if args is None:
        return
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda leaf: isinstance(leaf, PackedSequence))
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise CaptureError(
            "an example input is a PackedSequence, whose sizes depend on the data",
            where=forward_line(model),
            advice="pass padded tensors and lengths, and keep the module that packs them whole with leaf=; or take "
            "the tracing flow, quantc.flows.tracing, which runs the model as it is",
        )
    odd = next(
        (x for x in leaves if isinstance(x, torch.Tensor) and (x.layout is not torch.strided or x.is_nested)), None
    )
    if odd is not None:
        raise CaptureError(
            f"an example input {'is nested' if odd.is_nested else f'has the layout {odd.layout}'}, and programs take dense tensors",
            where=forward_line(model),
            advice="give x.to_dense(), or x.to_padded_tensor(0.0) of a nested one",
        )
    _check_call(model, args, kwargs)


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [key for key in kwargs if key not in signature.parameters]
        hint = f"; {suggest(unknown[0], signature.parameters, noun='parameters')}" if unknown else ""
        reason = f"it takes no keyword {unknown[0]!r}" if unknown else str(error)
        raise CaptureError(
            f"{type(model).__name__} does not run on the example inputs: {reason}",
            where=forward_line(model),
            advice=f"forward takes {signature}: write {_capture_line(signature, kwargs)}; "
            f"give its positional arguments as example_inputs and its keywords as example_kwargs{hint}",
        ) from error


def _capture_line(signature: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """The call of capture that gives all that `forward` asks for, and the keywords that were meant."""
    kinds = inspect.Parameter
    rows = [row for row in signature.parameters.values() if row.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)]
    named = [
        row.name
        for row in rows
        if row.kind is kinds.KEYWORD_ONLY and (row.default is kinds.empty or row.name in kwargs)
    ]
    placed = [row.name for row in rows if row.kind is not kinds.KEYWORD_ONLY and row.default is kinds.empty]
    named += [row.name for row in rows if row.name in kwargs and row.name not in (*placed, *named)]
    given = f"({', '.join(placed)}{',' if len(placed) == 1 else ''})"
    keywords = f", example_kwargs={{{', '.join(f'{name!r}: {name}' for name in named)}}}" if named else ""
    return f"qc.capture(model, {given}{keywords})"
