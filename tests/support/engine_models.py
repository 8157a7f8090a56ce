"""A model with named inputs and a dict of results, quantized for engines outside torch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.support.optional_dependency import is_installed
from tests.support.onnx_models import quantized, seeded

needs_openvino = pytest.mark.skipif(not is_installed("openvino"), reason="needs the extra `openvino`")
OUTSIDE = ["onnxruntime", pytest.param("openvino", marks=needs_openvino)]


class Net(nn.Module):
    """An image and a number for each, by name, to a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, image: Tensor, weight: Tensor) -> dict[str, Tensor]:
        pooled = torch.relu(self.conv(image)).mean((2, 3))
        return {"logits": self.head(pooled) * weight, "pooled": pooled}


def inputs(batch: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    made: tuple[Tensor, Tensor] = seeded(lambda: (torch.randn(batch, 3, 8, 8), torch.rand(batch, 1)), seed)
    return made


@cache
def engine_program() -> qc.Program:
    batch = Dim("batch")
    sizes = {"image": {0: batch}, "weight": {0: batch}}
    return quantized(seeded(Net), [inputs(2), inputs(2, 1)], dynamic_shapes=sizes)
