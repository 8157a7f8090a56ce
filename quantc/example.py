"""The embedded example: a small residual CNN for the 8x8 digit images that scikit-learn ships."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions around which the input is added back."""

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
    """Images of shape (batch, 1, 8, 8) to ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU(inplace=True))
        self.block1 = Residual(24)
        self.down = nn.Sequential(nn.Conv2d(24, 48, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(48), nn.ReLU6())
        self.block2 = Residual(48)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block1(self.stem(images))
        x = self.block2(self.down(x))
        logits: Tensor = self.head(self.dropout(x.mean((2, 3))))
        return logits


def digits_cnn() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model in eval mode, with weights drawn from a fixed seed, and example inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = DigitsCNN().eval()
        return model, (torch.rand(4, 1, 8, 8),)
