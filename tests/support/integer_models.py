"""Small models that between them reach most integer ops, and what converts them."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.cli.example import digits_cnn
from quantc.ir.program import Program
from tests.support.encoders import Layer
from tests.support.named_ops import naming

Style = Literal["fused", "decomposed"]
Multiplier = Literal["float64", "fixed"]
STYLES: tuple[Style, ...] = ("fused", "decomposed")
MULTIPLIERS: tuple[Multiplier, ...] = ("float64", "fixed")
BACKENDS = ("x86", "qnnpack", "executorch")


class Residual(nn.Module):
    """Two convolutions, with the input added in between, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.short = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.second(F.relu(self.norm(self.first(x)))) + self.short(x))
        return self.last(F.adaptive_avg_pool2d(F.max_pool2d(y, 2), 1).flatten(1))


def pools() -> nn.Module:
    """Pools, curves, a transposed and a dilated convolution, a softmax."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Hardswish(),
        nn.AvgPool2d(2),
        nn.Sigmoid(),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.LeakyReLU(),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Flatten(),
        nn.Linear(4 * 8 * 8, 4),
        nn.Softmax(-1),
    )


class Branches(nn.Module):
    """A condition with a linear in each branch."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.yes, self.no = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = F.relu(self.before(x))
        return torch.cond(x.sum() > 0, lambda v: self.yes(v) + 1, lambda v: F.relu(self.no(v)), (y,))


NAMES = ("digits", "residual", "encoder", "pools", "branches")


def built(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model in eval mode, with example inputs."""
    torch.manual_seed(7)
    if name == "digits":
        model, (images, *_) = digits_cnn()
        return model.eval(), (images[:4],)
    rows: dict[str, tuple[Any, Tensor]] = {
        "residual": (Residual, torch.randn(3, 3, 8, 8)),
        "encoder": (lambda: Layer(16, 2, norm_first=False), torch.randn(3, 5, 16)),
        "pools": (pools, torch.randn(2, 3, 14, 14)),
        "branches": (Branches, torch.randn(3, 4)),
    }
    make, example = rows[name]
    return make().eval(), (example,)


@cache
def prepared(name: str, backend: str, dynamic: bool = False) -> tuple[Program, tuple[Tensor, ...]]:
    """A calibrated program, and inputs to try: with a dynamic batch, inputs of another batch size."""
    model, inputs = built(name)
    shapes = ({0: Dim("batch", min=1)},) if dynamic else None
    captured = qc.capture(model, inputs, dynamic_shapes=shapes)
    program = qc.prepare(captured, backend, config=naming(captured, backend))
    qc.calibrate(program, [inputs, tuple(-value for value in inputs)])
    tried = tuple(torch.cat([value, value * 0.7]) for value in inputs) if dynamic else inputs
    return program, tried


def converted(
    name: str, backend: str, style: Style, *, multiplier: Multiplier = "float64", dynamic: bool = False
) -> tuple[Program, tuple[Tensor, ...]]:
    program, inputs = prepared(name, backend, dynamic)
    return qc.convert(program, to="integer", multiplier=multiplier, style=style), inputs
