"""Benchmark networks in plain torch: image classifiers, transformer encoders, a recurrent one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# -- ResNet ----------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A residual block. Its activations are separate modules: PT2E's x86 quantizer refuses a shared one."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU(inplace=True)
        is_same = stride == 1 and inputs == outputs
        conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.shortcut = nn.Identity() if is_same else nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu2(y + self.shortcut(x))
        return out


def resnet18() -> nn.Module:
    widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2))
    stem = (nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    blocks = [Residual(*sizes) for sizes in (*widths, (512, 512, 1))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)).eval()


# -- MobileNetV2 -----------------------------------------------------------------------------------------------


def conv_bn_relu6(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        layers: list[nn.Module] = [] if expand == 1 else [conv_bn_relu6(inputs, hidden, kernel=1)]
        layers += [
            conv_bn_relu6(hidden, hidden, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.use_res_connect = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Any:
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNetV2(nn.Module):
    """All 17 inverted residuals at their real widths."""

    SETTINGS = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 100) -> None:
        super().__init__()
        features: list[nn.Module] = [conv_bn_relu6(3, 32, stride=2)]
        width = 32
        for expand, outputs, repeats, stride in self.SETTINGS:
            for index in range(repeats):
                features.append(InvertedResidual(width, outputs, stride if index == 0 else 1, expand))
                width = outputs
        features.append(conv_bn_relu6(width, 1280, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        return self.classifier(torch.flatten(x, 1))


# -- EfficientNet-Lite0 ----------------------------------------------------------------------------------------

STAGES = (
    # kernel, repeats, inputs, outputs, expansion, stride
    (3, 1, 32, 16, 1, 1),
    (3, 2, 16, 24, 6, 2),
    (5, 2, 24, 40, 6, 2),
    (3, 3, 40, 80, 6, 2),
    (5, 3, 80, 112, 6, 1),
    (5, 4, 112, 192, 6, 2),
    (3, 1, 192, 320, 6, 1),
)
EPS = 1e-3


class Unit(nn.Sequential):
    """Convolution and batch norm. With a stride the padding is uneven, as in the framework it was first trained in."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        even = kernel // 2 if stride == 1 else 0
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, outputs, kernel, stride, even, groups=groups, bias=False),
            nn.BatchNorm2d(outputs, eps=EPS),
        ]
        if stride == 2:
            before, after = (kernel - 2) // 2, (kernel - 1) // 2
            layers.insert(0, nn.ZeroPad2d((before, after, before, after)))
        super().__init__(*layers)


class LiteBlock(nn.Module):
    """An inverted residual: expand, depthwise, project."""

    def __init__(self, kernel: int, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = Unit(inputs, hidden, 1) if expansion != 1 else None
        self.depthwise = Unit(hidden, hidden, kernel, stride, groups=hidden)
        self.project = Unit(hidden, outputs, 1)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Any:
        y = x if self.expand is None else nn.functional.relu6(self.expand(x))
        y = self.project(nn.functional.relu6(self.depthwise(y)))
        return y + x if self.has_shortcut else y


class EfficientNetLite0(nn.Module):
    """The network: 16 inverted residuals with ReLU6, no squeeze-and-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Unit(3, 32, 3, stride=2)
        blocks: list[nn.Module] = []
        for kernel, repeats, inputs, outputs, expansion, stride in STAGES:
            for index in range(repeats):
                first = index == 0
                source = inputs if first else outputs
                blocks.append(LiteBlock(kernel, source, outputs, expansion, stride if first else 1))
        self.blocks = nn.Sequential(*blocks)
        self.head = Unit(320, 1280, 1)
        self.fc = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Any:
        x = self.blocks(nn.functional.relu6(self.stem(x)))
        x = nn.functional.adaptive_avg_pool2d(nn.functional.relu6(self.head(x)), 1)
        return self.fc(torch.flatten(x, 1))


# -- transformer encoders --------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention in separate ops, with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        batch, tokens, width = x.shape
        size = width // self.heads
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) * size**-0.5, -1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(batch, tokens, width))


class Layer(nn.Module):
    """Attention and feed-forward. Pre-norm in a ViT, post-norm in BERT."""

    def __init__(self, width: int, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def feed(self, x: Tensor) -> Any:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Any:
        if self.norm_first:
            x = x + self.attention(self.norm1(x))
            return x + self.feed(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.feed(x))


class ViT(nn.Module):
    """Vision transformer; by default the size called Tiny."""

    def __init__(self, width: int = 192, heads: int = 3, depth: int = 12, image: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(Layer(width, heads, norm_first=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(x))[:, 0])


class TextEncoder(nn.Module):
    """A token encoder like BERT, without a mask; by default half as deep as its base size."""

    def __init__(
        self, width: int = 768, heads: int = 12, depth: int = 6, length: int = 128, words: int = 30522
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, heads, norm_first=False) for _ in range(depth)))

    def forward(self, tokens: Tensor) -> Any:
        return self.layers(self.norm(self.words(tokens) + self.position))


# -- linear and recurrent --------------------------------------------------------------------------------------


def mlp(width: int = 4096) -> nn.Module:
    hidden = (layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU()))
    return nn.Sequential(*hidden, nn.Linear(width, 1000))


class Sequences(nn.Module):
    """Two layers of LSTM and a classifier."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.lstm(x)[0])
