"""First layers of networks that read images of three channels, quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import quantc as qc


def stem(taps: int, padding: int, stride: int = 2) -> nn.Module:
    torch.manual_seed(0)
    after = nn.Conv2d(16, 16, 3, padding=1)
    return nn.Sequential(nn.Conv2d(3, 16, taps, stride, padding), nn.ReLU(), after).eval()


def converted(model: nn.Module, backend: str, reduce_range: Any = "auto") -> tuple[qc.Program, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    batches = [torch.randn(1, 3, 16, 24, generator=chance) for _ in range(3)]
    prepared = qc.prepare(qc.capture(model, (batches[0],)), backend)
    qc.calibrate(prepared, batches[:2], progress="silent")
    return qc.convert(prepared, reduce_range=reduce_range), batches[2]
