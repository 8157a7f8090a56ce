"""Image and video networks: their true structure at small widths."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.vision import BasicBlock, ConvNeXtBlock


class ResNet18(nn.Module):
    """All blocks of ResNet-18 at a quarter of its widths."""

    def __init__(self, width: int = 16, classes: int = 100) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        sizes = [width * factor for factor in (1, 1, 2, 4, 8)]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(
                    BasicBlock(sizes[n], sizes[n + 1], 1 if n == 0 else 2), BasicBlock(*sizes[n + 1 :][:1] * 2)
                )
                for n in range(4)
            )
        )
        self.fc = nn.Linear(8 * width, classes)

    def forward(self, x: Tensor) -> Any:
        x = self.layers(self.maxpool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def conv_bn(inputs: int, outputs: int, kernel: int, stride: int, act: nn.Module, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), act)


class Excite(nn.Module):
    """Squeeze and excite, with the gate and the activation of its network."""

    def __init__(self, width: int, squeezed: int, act: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce, self.expand = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)
        self.act, self.gate = act, gate

    def forward(self, x: Tensor) -> Any:
        return x * self.gate(self.expand(self.act(self.reduce(self.pool(x)))))


class Bottleneck(nn.Module):
    """The inverted residual of MobileNetV3 and EfficientNet."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        kernel: int,
        stride: int,
        act: type[nn.Module],
        gate: nn.Module | None,
    ) -> None:
        super().__init__()
        squeeze_act = nn.SiLU() if act is nn.SiLU else nn.ReLU()
        self.expand = conv_bn(inputs, hidden, 1, 1, act())
        self.depthwise = conv_bn(hidden, hidden, kernel, stride, act(), groups=hidden)
        self.excite = nn.Identity() if gate is None else Excite(hidden, max(hidden // 4, 8), squeeze_act, gate)
        self.project = conv_bn(hidden, outputs, 1, 1, nn.Identity())
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Any:
        y = self.project(self.excite(self.depthwise(self.expand(x))))
        return x + y if self.is_residual else y


class MobileNetV3(nn.Module):
    """The rows of MobileNetV3-Small, at half its widths."""

    ROWS: tuple[tuple[int, int, int, bool, type[nn.Module], int], ...] = (
        (3, 8, 8, True, nn.ReLU, 2),
        (3, 36, 12, False, nn.ReLU, 2),
        (3, 44, 12, False, nn.ReLU, 1),
        (5, 48, 20, True, nn.Hardswish, 2),
        (5, 120, 20, True, nn.Hardswish, 1),
        (5, 120, 20, True, nn.Hardswish, 1),
        (5, 60, 24, True, nn.Hardswish, 1),
        (5, 144, 48, True, nn.Hardswish, 2),
        (5, 288, 48, True, nn.Hardswish, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 8, 3, 2, nn.Hardswish())]
        width = 8
        for kernel, hidden, outputs, excite, act, stride in self.ROWS:
            layers.append(Bottleneck(width, hidden, outputs, kernel, stride, act, nn.Hardsigmoid() if excite else None))
            width = outputs
        layers.append(conv_bn(width, 288, 1, 1, nn.Hardswish()))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(288, 128), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(128, 50))

    def forward(self, x: Tensor) -> Any:
        return self.classifier(self.features(x).mean([2, 3]))


class EfficientNet(nn.Module):
    """The stages of EfficientNet-B0, one block each but for the third, at half its widths."""

    ROWS = ((3, 1, 8, 1), (3, 6, 12, 2), (5, 6, 20, 2), (5, 6, 20, 1), (3, 6, 40, 2), (5, 6, 56, 1), (5, 6, 96, 2))

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_bn(3, 16, 3, 2, nn.SiLU())]
        width = 16
        for kernel, factor, outputs, stride in self.ROWS:
            layers.append(Bottleneck(width, width * factor, outputs, kernel, stride, nn.SiLU, nn.Sigmoid()))
            width = outputs
        self.features = nn.Sequential(*layers, conv_bn(width, 320, 1, 1, nn.SiLU()))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(320, 50))

    def forward(self, x: Tensor) -> Any:
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(self.features(x), 1), 1))


class ChannelNorm(nn.Module):
    """Layer norm over the channels of an image, as ConvNeXt has it between stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Any:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 24, 4, stride=4), ChannelNorm(24))
        self.first = nn.Sequential(ConvNeXtBlock(24), ConvNeXtBlock(24))
        self.down = nn.Sequential(ChannelNorm(24), nn.Conv2d(24, 48, 2, stride=2))
        self.second = nn.Sequential(ConvNeXtBlock(48), ConvNeXtBlock(48))
        self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 20)

    def forward(self, x: Tensor) -> Any:
        x = self.second(self.down(self.first(self.stem(x))))
        return self.head(self.norm(x.mean([-2, -1])))


class WindowAttention(nn.Module):
    """Attention inside windows, with a bias by relative position looked up in a table."""

    index: Tensor

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads) * 0.2)
        grid = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        offsets = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + window - 1
        self.register_buffer("index", offsets[..., 0] * (2 * window - 1) + offsets[..., 1])

    def forward(self, x: Tensor, mask: Tensor | None) -> Any:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(b // windows, windows, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, n, n)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c))


class SwinBlock(nn.Module):
    mask: Tensor | None

    def __init__(self, width: int, heads: int, size: int, window: int, shift: int) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, window)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.register_buffer("mask", self.regions() if shift else None)

    def regions(self) -> Any:
        """Pixels that a shift brings together from different sides of the image do not see each other."""
        cuts = [slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None)]
        image = torch.zeros(1, self.size, self.size, 1)
        for number, (rows, columns) in enumerate([(r, c) for r in cuts for c in cuts]):
            image[:, rows, columns] = number
        flat = self.split(image).squeeze(-1)
        return (flat.unsqueeze(1) - flat.unsqueeze(2)).ne(0).float() * -100.0

    def split(self, x: Tensor) -> Any:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window * self.window, c)

    def join(self, windows: Tensor, b: int) -> Any:
        count = self.size // self.window
        x = windows.view(b, count, count, self.window, self.window, -1)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(b, self.size, self.size, -1)

    def forward(self, x: Tensor) -> Any:
        y = self.norm1(x)
        y = torch.roll(y, (-self.shift, -self.shift), (1, 2)) if self.shift else y
        y = self.join(self.attn(self.split(y), self.mask), x.shape[0])
        x = x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Patches, two windowed blocks (one shifted), patch merging, and a block on the merged map."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(SwinBlock(width, 2, 8, 4, 0), SwinBlock(width, 2, 8, 4, 2))
        self.merge_norm, self.merge = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)
        self.last = SwinBlock(2 * width, 4, 4, 4, 0)
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.blocks(self.patches(x).permute(0, 2, 3, 1))
        corners = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
        x = self.last(self.merge(self.merge_norm(torch.cat(corners, -1))))
        return self.head(self.norm(x).mean([1, 2]))


class VideoNet(nn.Module):
    """R(2+1)D: a spatial and a temporal convolution for each of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv3d(3, 8, (3, 5, 5), (1, 2, 2), (1, 2, 2), bias=False), nn.BatchNorm3d(8), nn.ReLU()
        )
        self.spatial = nn.Sequential(
            nn.Conv3d(8, 16, (1, 3, 3), padding=(0, 1, 1), bias=False), nn.BatchNorm3d(16), nn.ReLU()
        )
        self.temporal = nn.Sequential(nn.Conv3d(16, 8, (3, 1, 1), padding=(1, 0, 0), bias=False), nn.BatchNorm3d(8))
        self.pool, self.head = nn.MaxPool3d(2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        x = F.relu(x + self.temporal(self.spatial(x)))
        return self.head(F.adaptive_avg_pool3d(self.pool(x), 1).flatten(1))


class TwinTowers(nn.Module):
    """One encoder for two images, and their cosine: every weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.proj = nn.Linear(32, 16)

    def encode(self, x: Tensor) -> Any:
        return self.proj(self.encoder(x).mean((2, 3)))

    def forward(self, left: Tensor, right: Tensor) -> Any:
        a, b = self.encode(left), self.encode(right)
        return F.cosine_similarity(a, b, dim=-1), a, b


class UnusedOutputs(nn.Module):
    """Ops of which only one result is read, and a head nobody returns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 12)
        self.head, self.auxiliary = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Any:
        y, _ = F.max_pool2d(F.relu(self.conv(x)), 2, return_indices=True)
        y, _, _ = self.fc(y.flatten(2).transpose(1, 2)).split([6, 3, 3], -1)
        values, _ = y.topk(6, dim=-1, sorted=False)
        self.auxiliary(values)
        largest, _ = self.head(y).max(dim=1)
        return largest
