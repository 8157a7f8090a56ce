"""What is trained is what is converted, bit for bit: every backend, every layer that has weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import AnnotationError, TrainingError
from tests.support.training import assert_converts_exactly

BACKENDS = ("x86", "qnnpack", "executorch", "onnx", "openvino", "tensorrt")


class Held(nn.Module):
    """A product with a matrix it holds, spelled without a layer."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5))
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight) if self.adds else x @ self.weight


class First(nn.Module):
    """The first of what a recurrent layer yields."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)[0]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


S = nn.Sequential
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "linear": (nn.Linear(6, 5), (6,)),
    "linear without bias": (nn.Linear(6, 5, bias=False), (6,)),
    "linear, relu": (S(nn.Linear(6, 5), nn.ReLU()), (6,)),
    "linear, linear": (S(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), (6,)),
    "linear, norm": (S(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU()), (6,)),
    "linear, dropout, linear": (S(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 4)), (6,)),
    "linear of many axes": (S(nn.Linear(6, 5), nn.Flatten(), nn.Linear(15, 4)), (3, 6)),
    "conv1d": (nn.Conv1d(4, 5, 3), (4, 9)),
    "conv2d": (nn.Conv2d(4, 5, 3), (4, 7, 7)),
    "conv3d": (nn.Conv3d(4, 5, 3), (4, 5, 5, 5)),
    "depthwise": (S(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 5, 1)), (4, 7, 7)),
    "conv, norm, relu": (S(nn.Conv2d(4, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU()), (4, 7, 7)),
    "conv, pool, linear": (
        S(nn.Conv2d(4, 5, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3)),
        (4, 7, 7),
    ),
    "transposed": (S(nn.ConvTranspose2d(4, 5, 3), nn.ReLU()), (4, 5, 5)),
    "transposed, norm": (S(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)), (4, 5, 5)),
    "residual": (Residual(), (4, 7, 7)),
    "matmul": (Held(adds=False), (6,)),
    "addmm": (Held(adds=True), (6,)),
    "lstm": (First(nn.LSTM(6, 5, batch_first=True)), (3, 6)),
    "gru": (First(nn.GRU(6, 5, batch_first=True)), (3, 6)),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (3, 8)),
}
CONFIGS = {
    "default": qc.QuantConfig(),
    "learned": qc.QuantConfig()
    .set_all(qc.UINT8.but(observe="lsq-plus"))
    .set_all(qc.INT8_NARROW_WEIGHT.but(observe="lsq")),
    "learned, few bits": qc.QuantConfig().set_all(qc.INT8_NARROW_WEIGHT.but(observe="lsq", scale_bits=4)),
}


FLOAT = {
    "executorch": ("conv3d", "matmul", "addmm", "lstm", "gru"),
    "onnx": ("transposed", "transposed, norm"),
    "openvino": ("transposed", "transposed, norm"),
    "tensorrt": ("transposed", "transposed, norm"),
}
"""What backends have no rule for."""


def trained(layer: str, backend: str, config: str = "default") -> qc.Program | None:
    torch.manual_seed(0)
    model, shape = LAYERS[layer]
    x = torch.randn(8, *shape)
    program = qc.capture(model.eval(), (x,))
    try:
        made = qc.prepare(program, backend, qat=True, config=CONFIGS[config])
    except (AnnotationError, TrainingError):
        return None
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        made(torch.randn(8, *shape)).square().mean().backward()
        optimizer.step()
    return made


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(
    "backend", [name if name in ("x86", "onnx") else pytest.param(name, marks=pytest.mark.slow) for name in BACKENDS]
)
def test_what_is_trained_is_what_is_converted(backend: str, layer: str) -> None:
    made = trained(layer, backend)
    assert made is not None or layer in FLOAT.get(backend, ()), "what is quantized can be trained"
    for seed in range(5) if made is not None else ():
        torch.manual_seed(seed)
        assert_converts_exactly(made, torch.randn(8, *LAYERS[layer][1]))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("config", list(CONFIGS)[1:])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_trained_is_what_is_converted_with_configs(backend: str, layer: str, config: str) -> None:
    made = trained(layer, backend, config)
    if made is not None:
        assert_converts_exactly(made, torch.randn(8, *LAYERS[layer][1]))
