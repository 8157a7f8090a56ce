"""Models on the kernels of one x86 family, and what running them as one function is held to."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.kernels.running_form import Choosing


class Residual(nn.Module):
    """Two branches around which there is a sum, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def of_family(model: nn.Module, family: str, *shape: int) -> tuple[Lowered, Tensor]:
    """A model on the kernels of one family, and something to call it with."""
    torch.manual_seed(0)
    batches = [torch.randn(shape) for _ in range(3)]
    program = qc.quantize(model.eval(), (batches[0],), batches).program
    plain = qc.lower(program, "x86")
    other = {"fbgemm": "onednn", "onednn": "fbgemm"}[family]
    saved = {key: name.replace(other, family) for key, name in plain.choices.items()}
    return Lowered(plain.program, "x86", Choosing(saved=saved)), batches[1]


def check_line(lowered: Lowered, x: Tensor) -> None:
    given = x.clone()
    first, second, third = lowered(x), lowered(x), lowered.module(x)[0]
    assert lowered._line is not None
    assert torch.equal(x, given)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert first.stride() == second.stride()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.count: Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        made: Tensor = self.layer(x) + self.count
        return made
