"""A small network whose weights are changed in ways that a converted model must notice."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANGED = "was written to or replaced"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        return F.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    """A norm that is folded, a weight that is computed of another, and one that is used as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(4, 3)
        self.table, self.factor = nn.Parameter(torch.randn(3, 3)), 2.0

    def forward(self, x: Tensor) -> Any:
        x = self.head(self.block(x).mean((2, 3)))
        return F.linear(x, self.table.t() * self.factor)


def images() -> Tensor:
    return torch.randn(4, 4, 6, 6)
