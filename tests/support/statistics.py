"""Batches of awkward rows, statistics of them, and all the bits that they hold."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from quantc.observe.statistic_registry import STATISTICS
from quantc.spec.statistic import Statistic

Batch = tuple[int, Tensor]
"""The number of a batch, and its rows."""
KINDS = ("moments", "gram", "cross-gram", "fisher", "reservoir")


@st.composite
def batches(draw: st.DrawFn, groups: int | None = None) -> list[Batch]:
    """Numbered batches of one width: channels and batches of all scales, dead channels, few rows and no rows."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    groups = draw(st.integers(1, 3)) if groups is None else groups
    width = 2 * draw(st.integers(1, 6))
    scales = 10.0 ** torch.randint(-12, 12, (groups, 1, width), generator=generator)
    found = []
    for number in range(draw(st.integers(1, 6))):
        rows = torch.randn(groups, draw(st.integers(0, 9)), width, generator=generator) * scales
        rows = rows * 10.0 ** draw(st.integers(-9, 9))
        found.append((number, rows * (torch.rand(groups, 1, width, generator=generator) > 0.2)))
    return found


def statistic(kind: str, given: list[Batch]) -> Statistic:
    found = STATISTICS[kind].empty({"rows": 5} if kind == "reservoir" else {})
    for number, rows in given:
        found.update(rows, batch=number)
    return found


def bits_of(found: Statistic) -> dict[str, object]:
    """All it holds, in a form in which -0.0 is not 0.0."""
    state = found.to_state()
    tensors = {name: (str(x.dtype), x.shape, x.numpy().tobytes()) for name, x in state.tensors.items()}
    return {**tensors, **state.values}
