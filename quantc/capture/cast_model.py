"""Casts models in other float dtypes to float32 on request: only float32 is quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantc.capture.model_copies import Tensors, twin
from quantc.errors import CaptureError

FLOAT32 = "float32"


def as_dtype(given: str | torch.dtype) -> torch.dtype:
    """Validated dtype to cast to: only float32 can be quantized."""
    if given in (FLOAT32, torch.float32):
        return torch.float32
    raise CaptureError(
        f"dtype is {given!r}, and models are cast to float32 or not at all",
        where=f"dtype={given!r}",
        advice='write dtype="float32", or leave it out',
    )


def cast(
    model: nn.Module, args: tuple[Any, ...] | None, kwargs: dict[str, Any], dtype: torch.dtype
) -> tuple[nn.Module, tuple[Any, ...] | None, dict[str, Any], str]:
    """A copy of a model with floating-point parameters and buffers cast to a dtype, its example inputs, and a note."""
    found = sorted({_name(x.dtype) for x in (*model.parameters(), *model.buffers()) if _is_other(x, dtype)})
    own = twin(model, Tensors.COPIED).to(dtype) if found else model
    given, named = pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
    note = f"cast from {', '.join(found)} to {_name(dtype)}" if found else f"all parameters are {_name(dtype)} already"
    return own, given, named, note


def _is_other(x: Tensor, dtype: torch.dtype) -> bool:
    return x.is_floating_point() and x.dtype != dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
