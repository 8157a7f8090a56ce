"""Seeded noise in the place of inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def noise_like(leaves: Iterable[Any], generator: torch.Generator) -> list[Any]:
    """Noise of the shape, mean and spread of some inputs; those that are no floats are unchanged."""
    return [_like(leaf, generator) for leaf in leaves]


def _like(leaf: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not leaf.numel():
        return leaf
    spread = leaf.std(correction=0) or 1.0
    return (torch.randn(leaf.shape, generator=generator) * spread + leaf.mean()).to(leaf.dtype)
