"""Memory format of dense tensors, such as channels_last."""

from __future__ import annotations

import torch
from torch import Tensor


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """Dimensions from the outermost to the innermost; None if the tensor is contiguous or not dense."""
    usual = tuple(range(tensor.dim()))
    if tensor.stride() == _strides(tensor.shape, usual):
        return None
    sizes, strides = tuple(tensor.shape), tensor.stride()
    order = tuple(sorted(usual, key=lambda dim: (-strides[dim], -sizes[dim])))
    return order if tensor.stride() == _strides(tensor.shape, order) else None


def laid_out(plain: Tensor, order: tuple[int, ...]) -> Tensor:
    """A tensor with that memory order. ValueError if it is not an order of its dimensions."""
    if sorted(order) != list(range(plain.dim())):
        raise ValueError(f"{list(order)[:16]} is not an order of {plain.dim()} dimensions")
    made = torch.empty_strided(plain.shape, _strides(plain.shape, order), dtype=plain.dtype)
    return made.copy_(plain)


def _strides(shape: torch.Size, order: tuple[int, ...]) -> tuple[int, ...]:
    strides = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
