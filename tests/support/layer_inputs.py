"""Programs of one layer, prepared."""

from __future__ import annotations

import torch
from torch import nn

import quantc as qc
from quantc.annotate.quantizer import Backend
from quantc.ir.program import Program
from tests.support.small_backend import SMALL


def prepared_layer(layer: nn.Module, shape: tuple[int, ...], backend: Backend = SMALL) -> Program:
    """A layer alone, prepared for a small backend."""
    model = nn.Sequential(layer).eval()
    return qc.prepare(qc.capture(model, (torch.zeros(shape),), method="fx", dynamic_shapes=None), backend)
