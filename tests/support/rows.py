"""Batches of rows of eight numbers, and models of such quantized without a word."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc


def batches(count: int, size: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 8, generator=generator) for _ in range(count)]


def quantized(model: nn.Module, data: Any, **settings: Any) -> qc.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return qc.quantize(model.eval(), (batches(1)[0],), data, **settings)
