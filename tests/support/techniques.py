"""Programs whose layers are quantized by several techniques."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.ir.program import Program

WIDTH = 32


USES: dict[str, Any] = {
    "static": None,
    "dynamic": qc.UINT8_DYNAMIC,
    "weight-only": qc.INT8_WEIGHT_ONLY,
    "": qc.FLOAT,
}
"""What a config says for a layer that is to have a technique."""


def stack(techniques: list[str]) -> tuple[Program, qc.QuantConfig, Tensor]:
    """Linear layers, one for each technique, and the config that gives it to them."""
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH)
    program = qc.capture(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in techniques)).eval(), (x,))
    config = qc.QuantConfig()
    for index, technique in enumerate(techniques):
        if USES[technique] is not None:
            config = config.set(str(index), USES[technique])
    return program, config, x


class Attending(nn.Module):
    """Products with weights, a product without, moves, and sums."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.first = nn.Linear(6, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.first(self.before(x.transpose(1, 2)).transpose(1, 2)))
        return self.last(y @ y.transpose(1, 2) @ y) + self.last(y)


@cache
def attending_program() -> Program:
    torch.manual_seed(0)
    return qc.capture(Attending().eval(), (torch.randn(2, 8, 6),))


def in_mode(program: Program, mode: str, backend: str = "x86") -> tuple[Program, qc.QuantConfig]:
    result = qc.quantize(program, None, mode=mode, backend=backend)  # type: ignore[arg-type]
    assert result.prepared.plan.config is not None
    return result.prepared, result.prepared.plan.config
