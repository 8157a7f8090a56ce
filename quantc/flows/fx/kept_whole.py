"""Modules that no tracer looks into. They are taken to leave their inputs alone, and held to it."""

from __future__ import annotations

from typing import Any

from torch import nn

from quantc.errors import DataError
from quantc.flows.fx.open_sizes import Shapes, tensors_in
from quantc.ir.alias_analysis import LEAVES_INPUTS_ALONE

NAME, SHAPES, VERSIONS = "_quantc_name", "_quantc_shapes", "_quantc_versions"


def watch(module: nn.Module, name: str, shapes: Shapes | None = None) -> None:
    """Declare that a module writes to none of its inputs, and gives results of some shapes, and hold it to that."""
    is_watched = NAME in module.__dict__
    module.__dict__[LEAVES_INPUTS_ALONE] = True
    module.__dict__[NAME] = name
    module.__dict__[SHAPES] = shapes
    if is_watched:
        return
    module.register_forward_pre_hook(_before, with_kwargs=True)
    module.register_forward_hook(_after, with_kwargs=True)


def watch_like(source: nn.Module, copied: nn.Module) -> None:
    """Hold a copy to what the module it was made of is held to."""
    if NAME in source.__dict__:
        watch(copied, source.__dict__[NAME], source.__dict__[SHAPES])


def _versions(args: Any, kwargs: Any) -> list[int]:
    return [tensor._version for tensor in tensors_in((args, kwargs)) if not tensor.is_inference()]


def _before(module: nn.Module, args: Any, kwargs: Any) -> None:
    module.__dict__[VERSIONS] = _versions(args, kwargs)


def _after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    name, shapes = module.__dict__[NAME], module.__dict__[SHAPES]
    if _versions(args, kwargs) == module.__dict__.pop(VERSIONS, None):
        if shapes is not None:
            shapes.check(name, tensors_in((args, kwargs)), output)
        return
    raise DataError(
        f"{name} is kept whole and writes to a tensor that it is given",
        where=f"{type(module).__name__}.forward",
        advice="let it work on a copy: x = x.clone(); what is quantized around it must not change under its hands",
    )
