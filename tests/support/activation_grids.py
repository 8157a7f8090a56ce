"""Modules of one function, and every integer of a grid to run them on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from quantc.integer.grid import Grid


def grid(scale: float, zero_point: int = 0, dtype: torch.dtype = torch.uint8) -> Grid:
    info = torch.iinfo(dtype)
    step = torch.tensor(scale, dtype=torch.float32).double()
    return Grid(step, torch.tensor(zero_point), info.min, info.max, dtype)


SEEDS = st.integers(0, 2**32 - 1)


class Of(nn.Module):
    """A model that is a function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)
