"""Models that other tools can quantize too, for comparing the results number by number.

Batch norms are folded into their convolutions by torch, so that every tool starts from the same weights. Activations
have ordinary sizes throughout: the statistics of the batch norms are those of the data.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

Shape = tuple[int, ...]


class Residual(nn.Module):
    """A ResNet block with its shortcut, and a second one whose shortcut is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(16)
        self.short = nn.Conv2d(8, 16, 1, stride=2)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.bn0(self.stem(x)))
        y = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(y)) + x)
        x = F.relu(self.bn3(self.conv3(x)) + F.relu(self.short(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class AddOnTheLeft(nn.Module):
    """A sum whose second side is the convolution, with and without a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.c = nn.Conv2d(6, 6, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.a(x))
        x = F.relu(x + self.b(x))
        return F.max_pool2d(x, 2) + self.c(F.max_pool2d(x, 2))


class Inverted(nn.Module):
    """The inverted residuals of MobileNetV2: depthwise, linear bottlenecks, ReLU6."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.unit(3, 8, 3, 1)
        self.expand1 = self.unit(8, 24, 1, 1)
        self.depth1 = self.unit(24, 24, 3, 24)
        self.project1 = nn.Sequential(nn.Conv2d(24, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.expand2 = self.unit(8, 24, 1, 1)
        self.depth2 = self.unit(24, 24, 3, 24)
        self.project2 = nn.Sequential(nn.Conv2d(24, 12, 1, bias=False), nn.BatchNorm2d(12))
        self.fc = nn.Linear(12, 10)

    @staticmethod
    def unit(inputs: int, outputs: int, kernel: int, groups: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(),
        )

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        x = x + self.project1(self.depth1(self.expand1(x)))
        x = self.project2(self.depth2(self.expand2(x)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def waves() -> nn.Module:
    """One-dimensional convolutions, each with a ReLU."""
    return nn.Sequential(
        nn.Conv1d(2, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 3, dilation=2, padding=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(8 * 16, 5),
    )  # fmt: skip


class Pooled(nn.Module):
    """Pools of three kinds between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Any:
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.avg_pool2d(F.relu(self.b(x)), 2)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(F.relu(self.c(x)), 1), 1))


class Joined(nn.Module):
    """Branches of an Inception block, joined; and joined again with an earlier tensor, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.a = nn.Conv2d(6, 4, 1)
        self.b = nn.Conv2d(6, 4, 3, padding=1)
        self.c = nn.Conv2d(14, 5, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        y = torch.cat([F.relu(self.a(x)), F.relu(self.b(x))], 1)
        return self.c(torch.cat([y, x], 1))


class Feed(nn.Module):
    """The feed-forward part of a transformer, with its residual and norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attending(nn.Module):
    """Attention written out: three projections of one tensor, two products, softmax, and the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.k = nn.Linear(16, 16)
        self.v = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (part(x).reshape(2, 5, 2, 8).permute(0, 2, 1, 3) for part in (self.q, self.k, self.v))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)), -1)
        return self.out(torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(2, 5, 16))


class Moved(nn.Module):
    """Products with chains of reshapes and transposes between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, stride=4)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Any:
        x = torch.flatten(F.relu(self.conv(x)), 2)
        return self.head(F.relu(self.mix(x)).permute(0, 2, 1))


class Twice(nn.Module):
    """One tensor read by several products, and one module used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 12)
        self.b = nn.Linear(12, 12)
        self.c = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.a(x))
        return self.c(F.relu(self.b(F.relu(self.a(x)))) + F.relu(self.b(x)))


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 48), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 12), nn.Linear(12, 8))


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def plain_convs() -> nn.Module:
    """The VGG kind, with padding, strides, groups and dilation."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.ReLU(),
        nn.Conv2d(8, 12, 3, dilation=2), nn.ReLU(), nn.Conv2d(12, 4, 1),
    )  # fmt: skip


def smooth_convs() -> nn.Module:
    """Convolutions followed by hardswish, SiLU and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.Hardswish(), nn.Conv2d(8, 8, 3, padding=1), nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU6(), nn.Conv2d(8, 4, 1),
    )  # fmt: skip


IMAGE: Shape = (2, 3, 16, 16)


@dataclass(frozen=True)
class Subject:
    """A model to compare on, and the shape of its input."""

    name: str
    build: Callable[[], nn.Module]
    shape: Shape

    def model(self) -> nn.Module:
        return folded(self.with_norms())

    def with_norms(self) -> nn.Module:
        """The model as it was before its batch norms were folded."""
        torch.manual_seed(0)
        model = self.build()
        with torch.no_grad():
            for norm in (part for part in model.modules() if isinstance(part, nn.BatchNorm2d)):
                norm.momentum = 1.0
                nn.init.uniform_(norm.weight, 0.5, 1.5)
                nn.init.normal_(norm.bias, std=0.5)
            model.train()(self.batches(1, seed=5)[0][0])
        return model.eval()

    def batches(self, count: int, seed: int) -> list[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(seed)
        return [(torch.randn(self.shape, generator=generator),) for _ in range(count)]


SUBJECTS: tuple[Subject, ...] = (
    Subject("residual", Residual, IMAGE),
    Subject("add_on_the_left", AddOnTheLeft, IMAGE),
    Subject("inverted", Inverted, IMAGE),
    Subject("perceptron", perceptron, (8, 32)),
    Subject("waves", waves, (2, 2, 16)),
    Subject("plain_convs", plain_convs, IMAGE),
    Subject("smooth_convs", smooth_convs, IMAGE),
    Subject("pooled", Pooled, IMAGE),
    Subject("joined", Joined, IMAGE),
    Subject("chain", chain, (8, 24)),
    Subject("feed", Feed, (2, 5, 16)),
    Subject("attending", Attending, (2, 5, 16)),
    Subject("moved", Moved, IMAGE),
    Subject("twice", Twice, (8, 12)),
)


def folded(model: nn.Module) -> nn.Module:
    """A copy in which torch has folded every batch norm into its convolution."""
    return fuse(copy.deepcopy(model))
