"""What a program computes before and after a change that means to keep it: on its example inputs, and on noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from quantc.ir.program import Program
from quantc.pipeline.base_pass import Preserves
from quantc.pipeline.numeric_guard import NodeByNode, isolated_run
from quantc.pipeline.tolerance import Gap, Tolerance, gap

Outputs = list[list[Any]]


@dataclass(frozen=True)
class FloatCheck:
    """The outputs of a program with example inputs, to compare later ones with."""

    program: Program
    seed: int
    outputs: Outputs
    on_noise: bool = True

    @classmethod
    def of(cls, program: Program, seed: int = 0, *, on_noise: bool = True) -> FloatCheck:
        return cls(program, seed, _run(program, seed, on_noise), on_noise)

    def gap(self) -> Gap | None:
        """The difference of what the program computes now; None if it is rounding."""
        return gap(self.outputs, _run(self.program, self.seed, self.on_noise), Preserves.CLOSELY, Tolerance())


def _run(program: Program, seed: int, on_noise: bool) -> Outputs:
    examples = list(program.example_inputs or ())
    generator = torch.Generator().manual_seed(seed)
    found: Outputs = []
    for leaves in (examples, [_noise(leaf, generator) for leaf in examples])[: 1 + on_noise]:
        with isolated_run(program, seed):
            given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            values = pytree.tree_leaves(NodeByNode(program).run(*given, enable_io_processing=False))
            found.append([value.clone() if isinstance(value, Tensor) else value for value in values])
    return found


def _noise(leaf: Any, generator: torch.Generator) -> Any:
    """Noise of the size of an example; numbers that count or choose, in another order."""
    if not isinstance(leaf, Tensor) or not leaf.numel():
        return leaf
    if not leaf.is_floating_point():
        return leaf.reshape(-1)[torch.randperm(leaf.numel(), generator=generator)].reshape(leaf.shape)
    size = leaf.double().square().mean().sqrt() or 1.0
    return (torch.randn(leaf.shape, generator=generator) * size).to(leaf.dtype)
