"""The embedded examples: two small CNNs for the 8x8 digit images that scikit-learn ships.

The residual one quantizes easily. The separable one, whose depthwise convolutions have nine weights per channel, loses
accuracy with 4-bit weights unless it is trained with them. The weights ship with quantc, in `data/`, as float16 next to
a few of the images; `examples/train_digits.py` writes them. The other images are scikit-learn's own copy, read lazily.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import torch
from safetensors.torch import load
from torch import Tensor, nn

from quantc.errors import MissingDependencyError

IMAGES = "images"
"""The name of the example inputs among the weights."""
SPLIT_SEED = 0
HELD_OUT = 0.4
BATCHES = 8
BATCH_SIZE = 32


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + x)


class DigitsCNN(nn.Module):
    """Images of shape (batch, 1, 8, 8), from 0 to 1, to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True))
        self.block1 = Residual(32)
        self.down = nn.Sequential(nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU6())
        self.block2 = Residual(64)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block1(self.stem(images))
        x = self.block2(self.down(x))
        logits: Tensor = self.head(self.dropout(x.mean((2, 3))))
        return logits


def _separable(inputs: int, outputs: int, stride: int = 1) -> tuple[nn.Module, ...]:
    """A convolution of each channel by itself, then one that mixes them."""
    return (
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class SeparableCNN(nn.Sequential):
    """Images of shape (batch, 1, 8, 8), from 0 to 1, to ten logits."""

    def __init__(self) -> None:
        stem = (nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU6())
        blocks = (*_separable(32, 32), *_separable(32, 64, 2), *_separable(64, 64))
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Digits:
    """Digit images of shape (count, 1, 8, 8), from 0 to 1, and their labels."""

    images: Tensor
    labels: Tensor


def digits_cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The trained residual model in eval mode, and example inputs: four images it was not trained on."""
    return _load_model("digits_cnn", DigitsCNN)


def separable_cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The trained separable model in eval mode, and the same example inputs."""
    return _load_model("digits_separable", SeparableCNN)


def _load_model(name: str, build: type[nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    stored = load((resources.files("quantc") / "data" / f"{name}.safetensors").read_bytes())
    images = _scale_pixels(stored.pop(IMAGES))
    with torch.random.fork_rng(devices=[]):  # drawing the weights that are replaced below must not be noticed
        model = build()
    model.load_state_dict(stored)
    return model.eval(), (images,)


def digits_split() -> tuple[Digits, Digits]:
    """Training and held-out images: 1078 and 719, stratified by digit."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDependencyError(
            "the digit images are part of scikit-learn, which is not installed",
            where="quantc.example",
            advice="pip install 'quantc[example]'",
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    parts = train_test_split(pixels, labels, test_size=HELD_OUT, random_state=SPLIT_SEED, stratify=labels)
    train_pixels, held_pixels, train_labels, held_labels = (torch.from_numpy(part) for part in parts)
    return Digits(_scale_pixels(train_pixels), train_labels), Digits(_scale_pixels(held_pixels), held_labels)


def digits_data() -> tuple[list[Tensor], Digits]:
    """Calibration batches from the training images, and the held-out images."""
    train, held_out = digits_split()
    return list(torch.split(train.images[: BATCHES * BATCH_SIZE], BATCH_SIZE)), held_out


def _scale_pixels(pixels: Tensor) -> Tensor:
    """Pixels come as 0 to 16."""
    return (pixels.float() / 16).reshape(-1, 1, 8, 8)
