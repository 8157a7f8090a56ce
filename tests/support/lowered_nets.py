"""A network on images, quantized statically and dynamically, with a batch of any size."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.backends.x86 import X86
from quantc.ir.program import Program


class Net(nn.Module):
    """Convolutions, a sum that can be written over, floats between products, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(8, 8, 1),
        )
        self.last, self.norm = nn.Linear(8 * 6 * 6, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).relu()
        x = torch.relu(x + self.third(self.second(x).relu()))
        return self.norm(nn.functional.gelu(self.last(x.flatten(1)))), x


def image(batch: int, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


BATCH = {"x": {0: torch.export.Dim("batch", min=0, max=32)}}


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@cache
def static_program() -> Program:
    return qc.quantize(net(), (image(4),), [(image(4, seed),) for seed in range(2)], dynamic_shapes=BATCH).program


@cache
def dynamic_program() -> Program:
    named = qc.QuantConfig().set(nn.Conv2d, X86.modes["dynamic"])
    return qc.quantize(net(), (image(4),), mode="dynamic", config=named, dynamic_shapes=BATCH).program


def same(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
