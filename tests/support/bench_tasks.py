"""A tiny network to benchmark."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.bench.models import Task, noise


class Residual(nn.Module):
    """Convolutions with a sum that a kernel may write over, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.first(x))
        y = torch.relu(self.second(y) + y)
        return self.head(y.mean((2, 3)))


def tiny_task() -> Task:
    torch.manual_seed(0)
    data = noise(3, 12, 12)
    return Task("tiny", Residual().eval(), data(1, 2), data(2, 2))
