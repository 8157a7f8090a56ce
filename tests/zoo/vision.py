"""Image models: classifiers, their blocks, and a segmentation net."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantc.bench.networks import MobileNetV2
from tests.zoo.case import Case, floats, tags


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(16, 32)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(32, 4, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.drop(self.act(self.hidden(x))))


class BasicBlock(nn.Module):
    """The residual block of ResNet-18/34."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Any:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The real widths and depths of ResNet-18."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64), BasicBlock(64, 64))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Any:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.3))

    def forward(self, x: Tensor) -> Any:
        shortcut = x
        x = self.dwconv(x).permute(0, 2, 3, 1)
        x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
        x = self.gamma * x
        return shortcut + x.permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(width, squeezed, 1)
        self.act = nn.SiLU(inplace=True)
        self.expand = nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Any:
        scale = x.mean((2, 3), keepdim=True)
        return x * self.expand(self.act(self.reduce(scale))).sigmoid()


class MBConv(nn.Module):
    """The block of EfficientNet."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        hidden = 4 * width
        self.expand = nn.Conv2d(width, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden, eps=1e-3, momentum=0.01)
        self.depthwise = nn.Conv2d(hidden, hidden, 5, padding=2, groups=hidden, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden, eps=1e-3, momentum=0.01)
        self.se = SqueezeExcite(hidden, 2)
        self.project = nn.Conv2d(hidden, width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width, eps=1e-3, momentum=0.01)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Any:
        y = self.act(self.bn1(self.expand(x)))
        y = self.se(self.act(self.bn2(self.depthwise(y))))
        return x + self.bn3(self.project(y))


class DenseBlock(nn.Module):
    """The growing concatenation of DenseNet."""

    def __init__(self, width: int = 8, growth: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(width + index * growth) for index in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width + index * growth, growth, 3, padding=1) for index in range(3))

    def forward(self, x: Tensor) -> Any:
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return F.avg_pool2d(torch.cat(features, 1), 2)


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    """Two levels: one joined by a transposed convolution, one by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = DoubleConv(3, 8)
        self.down2 = DoubleConv(8, 16)
        self.bottom = DoubleConv(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.merge2 = DoubleConv(32, 16)
        self.merge1 = DoubleConv(24, 8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Any:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        c = self.bottom(self.pool(b))
        y = self.merge2(torch.cat([self.up(c), b], dim=1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        y = self.merge1(torch.cat([y, a], dim=1))
        return F.interpolate(self.head(y), size=(20, 20), mode="nearest")


class Pyramid(nn.Module):
    """Feature pyramid: a smaller map is resized to a larger one's `shape[-2:]` and added."""

    def __init__(self, widths: Sequence[int] = (4, 8)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.deep = nn.Conv2d(widths[0], widths[1], 3, stride=2, padding=1)
        self.lateral = nn.Conv2d(widths[0], 8, 1)

    def forward(self, x: Tensor) -> Any:
        fine = F.relu(self.stem(x))
        coarse = F.relu(self.deep(fine))
        up = F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")
        return up + self.lateral(fine), coarse


CASES = (
    Case("mlp", MLP, floats(16), shape_free=True, tags=tags("mlp", "train")),
    Case("resnet_block", lambda: BasicBlock(8, 8), floats(8, 8, 8), shape_free=True, tags=tags("cnn", "train")),
    Case(
        "resnet_downsample", lambda: BasicBlock(8, 16, 2), floats(8, 8, 8), shape_free=True, tags=tags("cnn", "train")
    ),
    Case("resnet18", ResNet18, floats(3, 64, 64), shape_free=True, tags=tags("cnn", "large")),
    Case("mobilenet_v2", MobileNetV2, floats(3, 32, 32), shape_free=True, tags=tags("cnn", "large")),
    Case("convnext_block", ConvNeXtBlock, floats(16, 8, 8), shape_free=True, tags=tags("cnn", "train")),
    Case("mbconv", MBConv, floats(8, 8, 8), shape_free=True, tags=tags("cnn", "train")),
    Case("dense_block", DenseBlock, floats(8, 8, 8), shape_free=True, tags=tags("cnn", "train")),
    Case("unet", UNet, floats(3, 16, 16), tags=tags("cnn", "train")),
    Case("pyramid", Pyramid, floats(3, 9, 9), tags=tags("cnn")),
)
