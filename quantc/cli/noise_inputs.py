"""Default inputs: seeded noise like the example inputs."""

from __future__ import annotations

from typing import Any

import torch

from quantc.errors import LoadError
from quantc.ir.program import Program
from quantc.support import seeded_noise


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
    return [seeded_noise.noise_like(leaves, generator) for _ in range(count)]
