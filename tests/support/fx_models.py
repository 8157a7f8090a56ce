"""Models in plain torch for the FX flow, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from quantc.bench.networks import Residual, conv_bn_relu6


class Classifier(nn.Module):
    """Convolutions, a batch norm, pools, a sum, a linear layer, a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.pool = nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
        self.average, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(functional.relu(self.norm(self.conv1(x))))
        x = torch.relu(self.conv2(x) + x)
        return torch.sigmoid(self.head(torch.flatten(self.average(x), 1)))


class Functional(nn.Module):
    """Everything as functions."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(6, 3, 3, 3) / 5), nn.Parameter(torch.randn(6) / 5)
        self.w2, self.b2 = nn.Parameter(torch.randn(4, 6) / 3), nn.Parameter(torch.randn(4) / 5)

    def forward(self, x: Tensor) -> Any:
        x = functional.relu(functional.conv2d(x, self.w1, self.b1, (1, 1), (1, 1), (1, 1), 1))
        x = functional.max_pool2d(x, 2)
        x = torch.flatten(functional.adaptive_avg_pool2d(x, 1), 1)
        return functional.linear(x, self.w2, self.b2)


class Joined(nn.Module):
    """Branches that are joined, and cut into parts again."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.cat([functional.relu(self.left(x)), self.right(x)], dim=1))


class Gated(nn.Module):
    """Squeeze and excite: a product with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Any:
        x = functional.hardswish(self.conv(x))
        return x * self.gate(self.up(functional.relu(self.down(self.pool(x)))))


class Attention(nn.Module):
    """One head's worth of attention, with shapes computed from sizes."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        new_x_shape = x.size()[:-1] + (self.heads, self.size)  # noqa: RUF005 - the sum of shapes is what is tested
        x = x.view(new_x_shape)
        return x.permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.transpose_for_scores(layer(x)) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), dim=-1)
        y = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(x.shape)
        return self.norm(x + self.out(y))


class FixedHeads(Attention):
    """The same with sizes written out."""

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(-1, 5, self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.transpose_for_scores(layer(x)) for layer in (self.q, self.k, self.v))
        weights = torch.softmax(torch.matmul(q, k.transpose(-1, -2)), dim=-1)
        y = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(-1, 5, 16)
        return self.norm(x + self.out(y))


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Any:
        return functional.interpolate(self.act(self.up(self.conv(x))), scale_factor=2.0, mode="nearest")


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv1d(2, 8, 5, padding=2), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.norm(self.conv(x))).mean(-1))


class Numbers(nn.Module):
    """Sums and products with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.second(functional.elu(self.first(x)) * 0.3)


def resnet() -> nn.Module:
    stem = (nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    blocks = (Residual(8, 8), Residual(8, 16, 2))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def mobilenet() -> nn.Module:
    layers = (conv_bn_relu6(3, 8), conv_bn_relu6(8, 8, groups=8), nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 5))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Hardswish(), nn.Linear(16, 4), nn.Sigmoid())


IMAGE, ROWS = (3, 16, 16), (8,)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "classifier": (Classifier, IMAGE),
    "functional": (Functional, IMAGE),
    "joined": (Joined, IMAGE),
    "gated": (Gated, IMAGE),
    "attention": (Attention, (5, 16)),
    "heads": (FixedHeads, (5, 16)),
    "upscaler": (Upscaler, IMAGE),
    "waves": (Waves, (2, 20)),
    "numbers": (Numbers, ROWS),
    "resnet": (resnet, IMAGE),
    "mobilenet": (mobilenet, IMAGE),
    "perceptron": (perceptron, ROWS),
}


def model_and_data(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A model with batch norms that have seen data, in eval mode, and batches for it."""
    torch.manual_seed(list(MODELS).index(name))
    make, shape = MODELS[name]
    model = make().train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, *shape))
    return model.eval(), [torch.randn(4, *shape) for _ in range(4)]
