"""Benchmark models: networks with random weights, and seeded noise as inputs.

Random weights rank tools by accuracy on the same network; they do not predict the accuracy of a trained one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quantc.bench.networks import EfficientNetLite0, MobileNetV2, Sequences, TextEncoder, ViT, mlp, resnet18

Inputs = list[tuple[Any, ...]]
"""Batches, each of which is the positional inputs of a model."""
Data = Callable[[int, int], Inputs]
"""Batches by seed and batch size."""

COUNT = 4
"""Batches per seed."""
CALIBRATION_SEED, UNSEEN_SEED = 1, 2
STD = 0.02
WORDS = 30522


@dataclass(frozen=True)
class Model:
    """A network, its inputs, and its batch size."""

    told: str
    build: Callable[[], nn.Module]
    data: Data
    batch: int = 1


@dataclass(frozen=True)
class Task:
    """Input of contenders: a float model in eval mode, calibration batches, and held-out batches."""

    name: str
    model: nn.Module
    calibration: Inputs
    unseen: Inputs
    program: Any = None
    """The program it was read from, where a file holds no module; otherwise contenders capture the model."""


def task_of(name: str, batch: int | None = None) -> Task:
    """One of the models, at its own batch size or another."""
    entry = MODELS[name]
    size = entry.batch if batch is None else batch
    torch.manual_seed(0)
    model = entry.build().eval()
    title = name if batch in (None, entry.batch) else f"{name}, batch {size}"
    return Task(title, model, entry.data(CALIBRATION_SEED, size), entry.data(UNSEEN_SEED, size))


# -- data ------------------------------------------------------------------------------------------------------


def noise(*shape: int) -> Data:
    """Normally distributed samples of a shape."""

    def made(seed: int, batch: int) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn((batch, *shape), generator=generator),) for _ in range(COUNT)]

    return made


def tokens(length: int = 128, words: int = WORDS) -> Data:
    """Sentences of uniformly distributed words."""
    return lambda seed, batch: texts(COUNT, batch, length, words, seed)


def texts(count: int, batch: int, length: int, words: int, seed: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, words, (batch, length), generator=generator),) for _ in range(count)]


# -- weights ---------------------------------------------------------------------------------------------------


def calibrate_norms(model: nn.Module, size: int = 224) -> nn.Module:
    """Calibrate batch norms: otherwise random weights make activations grow or vanish."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    model.train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(4, 3, size, size))
    return model.eval()


def initialise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights from a truncated normal distribution, biases zero; patches as torch initialises convolutions."""
    torch.manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=STD)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=STD)
        elif isinstance(part, nn.Conv2d):
            part.reset_parameters()
    for name, parameter in model.named_parameters():
        if name in ("token", "position"):
            nn.init.trunc_normal_(parameter, std=STD)
    return model.eval()


PHOTO = noise(3, 224, 224)

MODELS: dict[str, Model] = {
    "resnet18": Model("ResNet-18, images of 224 × 224", lambda: calibrate_norms(resnet18()), PHOTO),
    "resnet18-batch8": Model("the same, eight images at once", lambda: calibrate_norms(resnet18()), PHOTO, batch=8),
    "mobilenetv2": Model("MobileNetV2, images of 224 × 224", lambda: calibrate_norms(MobileNetV2(1000)), PHOTO),
    "efficientnet-lite0": Model(
        "EfficientNet-Lite0, images of 224 × 224", lambda: calibrate_norms(EfficientNetLite0()), PHOTO
    ),
    "bert": Model("6 layers of BERT's base size, 128 tokens", lambda: initialise(TextEncoder()), tokens()),
    "vit-tiny": Model("ViT-Tiny, images of 224 × 224", lambda: initialise(ViT()), PHOTO),
    "mlp": Model("4 linear layers, 4096 wide, one row", mlp, noise(4096)),
    "lstm": Model("2 layers of LSTM, 512 wide, 64 steps", Sequences, noise(64, 512)),
}
