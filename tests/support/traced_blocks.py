"""Residual blocks with places between their ops where a test puts its code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Code = Callable[["Blocks", int, Tensor], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor, code: Callable[[int, Tensor], Tensor], place: int) -> Any:
        y = code(place, self.conv1(x))
        y = code(place + 1, self.relu(self.norm1(y)))
        y = code(place + 2, self.norm2(self.conv2(y)))
        return self.relu(y + x)


class Blocks(nn.Module):
    """Residual blocks, with places between their ops where a test puts its code."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)
        self.code: Code = lambda model, place, x: x
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Any:
        def code(place: int, x: Tensor) -> Any:
            return self.code(self, place, x)

        x = code(0, F.relu(self.stem(x)))
        for turn, block in enumerate(self.blocks):
            x = block(x, code, 1 + 3 * turn)
        x = code(7, torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
        return code(8, self.head(x))


def images(count: int = 2) -> Tensor:
    return torch.randn(count, 3, 10, 10)


def fresh(quantized: Any, x: Tensor, code: Code | None = None) -> Any:
    """What a copy gives, which has not run before."""
    own = copy.deepcopy(quantized)
    own.kept = []
    if code is not None:
        own.code = code
    with torch.no_grad():
        return own(x)
