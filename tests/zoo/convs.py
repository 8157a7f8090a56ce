"""Convolutions and pooling outside the image-classifier mainstream."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case, floats, tags


class AudioNet(nn.Module):
    """Strided and dilated conv1d with batch norm and a gated activation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 8, 9, stride=4, padding=4)
        self.bn = nn.BatchNorm1d(8)
        self.dilated = nn.Conv1d(8, 16, 3, dilation=2, padding=2)
        self.glu = nn.GLU(dim=1)
        self.pool = nn.MaxPool1d(2)
        self.head = nn.Conv1d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = F.leaky_relu(self.bn(self.stem(x)), 0.1)
        y = self.pool(self.glu(self.dilated(y)))
        return F.adaptive_avg_pool1d(self.head(y), 1).squeeze(-1)


def video_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 6, (1, 3, 3)),
        nn.AvgPool3d((2, 1, 1)), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


class Decoder(nn.Module):
    """Transposed convolutions in one, two and three dimensions, with output padding, groups and dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8 * 4)
        self.up1 = nn.ConvTranspose1d(8, 8, 4, stride=2, padding=1, groups=2)
        self.bn1 = nn.BatchNorm1d(8)
        self.up2 = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1, output_padding=1)
        self.bn2 = nn.BatchNorm2d(4)
        self.up3 = nn.ConvTranspose3d(4, 2, (1, 3, 3), dilation=(1, 2, 2), bias=False)

    def forward(self, z: Tensor) -> Any:
        y = F.relu(self.bn1(self.up1(self.fc(z).view(-1, 8, 4))))
        y = F.relu(self.bn2(self.up2(y.unsqueeze(2))))
        return torch.tanh(self.up3(y.unsqueeze(2)))


def exotic_convs() -> nn.Module:
    """Grouped, depthwise with a multiplier, dilated, asymmetric."""
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, groups=4), nn.Hardswish(), nn.Conv2d(16, 32, 3, groups=16, bias=False),
        nn.Conv2d(32, 8, (1, 3), padding=(0, 2), dilation=(1, 2)), nn.ELU(0.7), nn.Conv2d(8, 4, (5, 1), stride=(2, 1)),
    )  # fmt: skip


class SamePadding(nn.Module):
    """`padding="same"`: an odd kernel pads evenly, an even one pads one more on the right."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(4, 4, kernel, padding="same")
        self.conv2 = nn.Conv2d(4, 6, kernel, padding="same", dilation=(1, 2))
        self.conv3 = nn.Conv2d(6, 2, kernel, padding="valid")

    def forward(self, x: Tensor) -> Any:
        y = self.conv1(x.flatten(2)).view_as(x)
        return self.conv3(torch.relu(self.conv2(y)))


class PaddingModes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.circular = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
        self.reflect = nn.Conv2d(4, 4, 3, padding=(2, 1), padding_mode="reflect")
        self.replicate = nn.Conv1d(4, 2, 5, padding=2, padding_mode="replicate")
        self.border = nn.ReflectionPad2d((1, 0, 0, 1))
        self.zeros = nn.ZeroPad2d(1)

    def forward(self, x: Tensor) -> Any:
        y = self.zeros(self.border(self.reflect(self.circular(x))))
        return self.replicate(y.mean(-1))


class Unpool(nn.Module):
    """SegNet's pair: pooling gives indices, unpooling takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Any:
        y, indices = self.pool(self.conv(x))
        values, places = F.max_pool2d(y, 2, return_indices=True)
        return self.unpool(y, indices), values, places


class Pools(nn.Module):
    """Pooling with its less common options."""

    def __init__(self) -> None:
        super().__init__()
        self.ceil = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.partial = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)
        self.adaptive = nn.AdaptiveMaxPool2d((2, 3))
        self.norm = nn.LPPool2d(2, 2)

    def forward(self, x: Tensor) -> Any:
        y = torch.cat([self.ceil(x), self.partial(F.pad(x, (0, 1, 0, 1)))], 1)
        return (
            self.adaptive(y),
            F.adaptive_avg_pool2d(y, (None, 2)),
            self.norm(x.abs()),
            F.avg_pool2d(x, 2, divisor_override=3),
        )


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1)
        self.shuffle = nn.PixelShuffle(2)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.mix = nn.ChannelShuffle(3)

    def forward(self, x: Tensor) -> Any:
        y = self.shuffle(self.mix(self.conv(x))) + self.up(x)
        return F.pixel_unshuffle(y, 2)


CASES = (
    Case("audio_conv1d", AudioNet, floats(1, 128), tags=tags("conv", "train")),
    Case("video_conv3d", video_net, floats(2, 4, 8, 8), shape_free=True, tags=tags("conv", "train")),
    Case("conv_transpose_decoder", Decoder, floats(6), shape_free=True, tags=tags("conv", "train")),
    Case("exotic_convs", exotic_convs, floats(8, 9, 9), shape_free=True, tags=tags("conv", "train")),
    Case("same_padding_odd", lambda: SamePadding(3), floats(4, 6, 6), tags=tags("conv")),
    Case("same_padding_even", lambda: SamePadding(4), floats(4, 8, 8), tags=tags("conv")),
    Case("padding_modes", PaddingModes, floats(3, 6, 6), shape_free=True, tags=tags("conv")),
    Case("max_unpool", Unpool, floats(3, 8, 8), tags=tags("conv")),
    Case("pools", Pools, floats(4, 9, 9), tags=tags("conv")),
    Case("super_resolution", SuperResolution, floats(3, 6, 6), tags=tags("conv")),
)
