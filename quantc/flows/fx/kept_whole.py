"""Modules that no tracer looks into. They are taken to leave their inputs alone, and held to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quantc.aliasing import LEAVES_INPUTS_ALONE
from quantc.errors import DataError

NAME = "_quantc_name"


def watch(module: nn.Module, name: str) -> None:
    """Declare that a module writes to none of its inputs, and refuse to go on should it do so."""
    module.__dict__[LEAVES_INPUTS_ALONE] = True
    module.__dict__[NAME] = name
    module.register_forward_pre_hook(_before, with_kwargs=True)
    module.register_forward_hook(_after, with_kwargs=True)


def watch_like(source: nn.Module, copied: nn.Module) -> None:
    """Hold a copy to what the module it was made of is held to."""
    if NAME in source.__dict__:
        watch(copied, source.__dict__[NAME])


def _versions(args: Any, kwargs: Any) -> list[int]:
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def _before(module: nn.Module, args: Any, kwargs: Any) -> None:
    module.__dict__["_quantc_versions"] = _versions(args, kwargs)


def _after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    if _versions(args, kwargs) == module.__dict__.pop("_quantc_versions", None):
        return
    raise DataError(
        f"{module.__dict__[NAME]} is kept whole and writes to a tensor that it is given",
        where=f"{type(module).__name__}.forward",
        advice="let it work on a copy: x = x.clone(); what is quantized around it must not change under its hands",
    )
