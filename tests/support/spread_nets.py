"""Nets whose channels have ranges far apart, as folded batch norms leave them, and what quantizing costs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.backends.qnnpack import QNNPACK
from quantc.ir.program import Program
from quantc.spec.spec import INT8_TENSOR_WEIGHT
from tests.support.channel_nets import Inverted, Residual

TENSOR = replace(QNNPACK, roles={**QNNPACK.roles, "weight": INT8_TENSOR_WEIGHT})
"""One scale for all weights of a layer."""


@torch.no_grad()
def spread(model: nn.Module, seed: int = 0, size: float = 1.2) -> nn.Module:
    """The model with gains and deviations of batch norms over several powers of two."""
    generator = torch.Generator().manual_seed(seed)
    for norm in model.modules():
        if not isinstance(norm, nn.BatchNorm2d):
            continue
        draws = [torch.randn(norm.num_features, generator=generator) for _ in range(4)]
        norm.weight.copy_(torch.exp(draws[0] * size))
        norm.bias.copy_(draws[1] * norm.weight)
        norm.running_var, norm.running_mean = torch.exp(draws[2]), draws[3] * 0.3
    return model.eval()


def mobile(act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 8, 3, padding=1), act(), Inverted(8, 8, act), Inverted(8, 12, act), Inverted(12, 12, act))
    return spread(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)))


def residual() -> nn.Module:
    torch.manual_seed(0)
    norms = (nn.BatchNorm2d(8), nn.ReLU())
    body = (nn.Conv2d(3, 8, 3, padding=1), *norms, Residual(), Residual())
    return spread(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)), size=2.0)


def images(seed: int, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 3, 12, 12, generator=generator) for _ in range(count)]


def collected(model: nn.Module, data: list[Tensor], backend: str | Backend = TENSOR) -> Program:
    """Prepared, calibrated and collected from."""
    prepared = qc.prepare(qc.capture(model, (data[0],), "fx", dynamic_shapes=None), backend)
    qc.calibrate(prepared, data, collect="recover", progress="silent")
    return prepared


@torch.no_grad()
def decibels(model: nn.Module, program: Program, data: Iterable[Tensor]) -> float:
    """The signal-to-noise ratio of a program's outputs, against the model itself."""
    pairs = [(model(x).double(), program(x).double()) for x in data]
    signal = sum(float(y.square().sum()) for y, _ in pairs)
    return float(10 * torch.tensor(signal / sum(float((y - z).square().sum()) for y, z in pairs)).log10())
