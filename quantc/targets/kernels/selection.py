"""Kernel selection: the fastest candidate, by cost table or measurement.

Without tuning, the built-in table at the nearest shape decides; where it has no row, the order of registration.
`qc.lower(..., tune=True)` measures on this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, fx

from quantc.ir.size_expressions import evaluate
from quantc.ir.types import tensor_type
from quantc.targets.kernels.costs import nearest
from quantc.targets.kernels.kernel import Kernel, Work

By = Literal["", "table", "measured", "remembered", "whole", "saved"]
"""The basis of a choice. Empty: no alternatives, or no figures for them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates for an op in order of preference, and their known times."""

    candidates: tuple[Kernel, ...]
    """The one that was taken is the first."""
    by: By = ""
    work: Work | None = None
    microseconds: dict[str, float] = field(default_factory=dict)
    """By name of the kernel; as the table has them, for the nearest shape."""

    @property
    def taken(self) -> Kernel:
        return self.candidates[0]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {time:.0f} µs" for name, time in self.microseconds.items())
        return f"{self.by}: {times}" if self.by else ""


def by_times(candidates: Sequence[Kernel], by: By, work: Work | None, microseconds: dict[str, float]) -> Choice:
    """Choice by time; candidates without a known time come last, in order of registration."""
    ordered = sorted(candidates, key=lambda kernel: microseconds.get(kernel.name, float("inf")))
    known = {kernel.name: microseconds[kernel.name] for kernel in ordered if kernel.name in microseconds}
    return Choice(tuple(ordered), by, work, known)


def by_table(target: str, candidates: Sequence[Kernel], inputs: Sequence[fx.Node], sizes: dict[str, int]) -> Choice:
    """Choice by the built-in cost table; `sizes` are those of dynamic axes, as far as known."""
    if len(candidates) == 1:
        return Choice(tuple(candidates))
    tensors = [_meta_tensor(node, sizes) for node in inputs]
    known = [tensor for tensor in tensors if tensor is not None]
    work = candidates[0].work(*known) if len(known) == len(tensors) else None
    row = None if work is None else nearest(target, work)
    if row is None:
        return Choice(tuple(candidates), "", work)
    times = {kernel.name: row.microseconds[kernel.family] for kernel in candidates if kernel.family in row.microseconds}
    return by_times(candidates, "table", work, times)


UNKNOWN_SIZE = 1
"""Assumed size of a dynamic axis where there are no example inputs: most often it is the batch."""


def _meta_tensor(node: fx.Node, sizes: dict[str, int]) -> Tensor | None:
    """A tensor without numbers, of the shape that a node yields."""
    kind = tensor_type(node)
    if kind is None:
        return None
    shape = [size if isinstance(size, int) else evaluate(size, sizes) or UNKNOWN_SIZE for size in kind.shape]
    return torch.empty(shape, dtype=kind.dtype, device="meta")
