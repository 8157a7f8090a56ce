"""Programs whose products find their scales as they run: every rule that can, in every kind of spec."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc import QuantConfig
from quantc.ir.program import Program
from quantc.spec.spec import QuantSpec
from tests.support.integer_oracle_dynamic import Forms

UINT8, TOKEN = qc.UINT8_DYNAMIC, qc.UINT8_TOKEN
SYMMETRIC = UINT8.but(scheme="symmetric")
SPECS = {
    "uint8": UINT8,
    "uint8 to 127": UINT8.but(qmax=127, eps=2.0**-14),
    "symmetric": SYMMETRIC,
    "tokens": TOKEN,
    "symmetric tokens": TOKEN.but(scheme="symmetric"),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Convolutions(nn.Module):
    """Over one, two and three axes, plain and transposed, with groups, steps and holes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.back = nn.Conv1d(4, 8, 3, padding=1), nn.ConvTranspose1d(8, 4, 2, stride=2)
        self.two = nn.Conv2d(4, 6, 3, groups=2, dilation=2, bias=False)
        self.grouped = nn.ConvTranspose2d(6, 8, 3, groups=2, padding=1)
        self.three = nn.Conv3d(2, 3, (1, 2, 2), stride=(1, 2, 1))

    def forward(self, x: Tensor) -> Any:
        wide = self.back(torch.relu(self.one(x)))
        image = self.grouped(self.two(wide.unflatten(2, (-1, 8))))
        return image, self.three(image.unflatten(1, (2, 4)))


class Matrices(nn.Module):
    """Every way of writing a product with a constant matrix, or of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(seeded(16, 12, seed=1)), nn.Parameter(seeded(12, seed=2))
        self.layer = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Any:
        y, rows = x @ self.w, x.reshape(-1, 16)
        vector = torch.addmm(self.b, rows, self.w, alpha=0.5, beta=2)
        added = torch.addmm(vector, rows, self.w, beta=0.25)
        return self.layer(y), vector, added


class OfTwo(nn.Module):
    """Products of two tensors that are both computed."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        batches = torch.matmul(x, y)
        rows = F.linear(x, y[0].t())
        summed = torch.baddbmm(batches, x, y, beta=0.5, alpha=2.0)
        return batches, rows, summed, torch.addmm(batches[0], x[0], y[0], alpha=-1.5), torch.matmul(x, y[0, :, 0])


NAMED = ("matmul", "addmm", "baddbmm", "linear")
WINDOWS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d")
IMAGE, ROWS = (seeded(2, 4, 32, seed=3),), (seeded(3, 5, 16, seed=4),)
PAIR = (seeded(3, 5, 16, seed=5), seeded(3, 16, 4, seed=6))


def prepared(model: nn.Module, inputs: tuple[Tensor, ...], spec: QuantSpec, *named: str, **options: Any) -> Program:
    config = QuantConfig().set_all(spec)
    for name in named:
        config = config.set_op(name, spec)
    return qc.prepare(qc.capture(model.eval(), inputs, **options), "x86", config=config)


def left(program: Program) -> list[str]:
    """Ops of the Q/DQ form that are still there."""
    return [str(node.target) for node in program.nodes() if "decomposed" in str(node.target)]


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], QuantSpec, tuple[str, ...], list[str]]] = {
    "convolutions": (
        Convolutions(),
        IMAGE,
        UINT8,
        WINDOWS,
        ["conv_dynamic", "conv_transpose_dynamic", "conv_dynamic", "conv_transpose_dynamic", "conv_dynamic"],
    ),
    "convolutions, symmetric": (
        Convolutions(),
        IMAGE,
        SYMMETRIC,
        WINDOWS,
        ["conv_dynamic", "conv_transpose_dynamic", "conv_dynamic", "conv_transpose_dynamic", "conv_dynamic"],
    ),
    **{
        f"matrices, {name}": (Matrices(), ROWS, spec, (), ["matmul_dynamic", "linear_dynamic", *["matmul_dynamic"] * 2])
        for name, spec in SPECS.items()
    },
    **{
        f"of two, {name}": (
            OfTwo(),
            PAIR,
            SPECS[name],
            NAMED,
            ["matmul_both_dynamic", "linear_both_dynamic", *["matmul_both_dynamic"] * 3],
        )
        for name in ("uint8", "uint8 to 127", "symmetric")
    },
}
every_case = pytest.mark.parametrize("name", CASES)


QUICK = ("convolutions", "matrices, tokens", "of two, uint8")
dear = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
"""The same, where a case takes long."""


@cache
def ready(name: str) -> Program:
    model, inputs, spec, named, _ = CASES[name]
    return prepared(model, inputs, spec, *named)


@cache
def forms(name: str, **options: Any) -> tuple[Forms, tuple[Tensor, ...]]:
    """Both forms of a case, to be read and not changed."""
    return Forms.of(ready(name), **options), CASES[name][1]
