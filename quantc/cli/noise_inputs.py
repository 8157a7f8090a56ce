"""Default inputs: seeded noise like the example inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.errors import LoadError
from quantc.ir.program import Program


def example_leaves(program: Program, source: str) -> tuple[Any, ...]:
    """Flat inputs a program was captured with; LoadError if it has none."""
    if program.example_inputs is None:
        raise LoadError(
            f"{program.name} has no example inputs to run it on",
            where=source,
            advice="give --data, or save it with them",
        )
    return tuple(program.example_inputs)


def noise_like(program: Program, source: str, seed: int, count: int) -> list[list[Any]]:
    """Flat inputs with the shapes, mean and spread of the example inputs; non-float inputs are unchanged."""
    leaves = example_leaves(program, source)
    generator = torch.Generator().manual_seed(seed)
    return [[_like(leaf, generator) for leaf in leaves] for _ in range(count)]


def _like(leaf: Any, generator: torch.Generator) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    spread = leaf.std(correction=0) or 1.0
    return (torch.randn(leaf.shape, generator=generator) * spread + leaf.mean()).to(leaf.dtype)
