"""What the observers of a prepared FX graph are shown, to compare it between two flows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Row = tuple[Tensor, tuple[Any, ...]]


def observed(prepared: nn.Module, x: Tensor) -> list[Row]:
    """Every activation that observers are shown, in order, with what they make of it."""
    rows: list[Row] = []

    def note(module: Any, args: tuple[Tensor, ...], _: Tensor) -> None:
        kind = module.dtype, getattr(module, "qscheme", None), module.quant_min, module.quant_max
        rows.append((args[0].detach().clone(), kind))

    named = [module for name, module in prepared.named_children() if name.startswith("activation_post_process")]
    hooks = [module.register_forward_hook(note) for module in named]
    prepared(x)
    for hook in hooks:
        hook.remove()
    return [row for row in rows if row[1][0] is torch.quint8]  # torch has weights of functions among them


def is_same(left: Row, right: Row) -> bool:
    same_kind = left[1] == right[1] and left[0].shape == right[0].shape
    return same_kind and torch.allclose(left[0], right[0], atol=1e-4, rtol=1e-4)
