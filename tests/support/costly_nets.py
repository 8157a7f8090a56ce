"""Networks whose accuracy is lost in elementwise ops, norms and wide inputs, with data like that of their use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Case(NamedTuple):
    """A model in eval mode, and batches."""

    model: nn.Module
    batches: list[Tensor]
    held_out: list[Tensor]


def hard_swish(x: Tensor) -> Tensor:
    return x * F.relu6(x + 3) / 6


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * (F.relu6(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))) + 3) / 6)


class InvertedResidual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.expand, self.norm1 = nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depth = nn.Conv2d(wide, wide, 5, stride, 2, groups=wide, bias=False)
        self.norm2, self.gate = nn.BatchNorm2d(wide), SqueezeExcite(wide)
        self.project, self.norm3 = nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = hard_swish(self.norm1(self.expand(x)))
        y = self.gate(hard_swish(self.norm2(self.depth(y))))
        y = self.norm3(self.project(y))
        return x + y if self.adds else y  # type: ignore[no-any-return]


class HardSwishNet(nn.Module):
    """Inverted residuals with hard-swish and squeeze-excite, both taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        rows = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1)]
        self.blocks = nn.Sequential(*(InvertedResidual(*row) for row in rows))
        self.head, self.last = nn.Linear(40, 64), nn.BatchNorm1d(64)
        self.classes = nn.Linear(64, 10, bias=False)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):  # as trained ones are: channels of different strength
                module.weight.data = torch.exp(0.7 * torch.randn(module.num_features))
                module.bias.data = torch.randn(module.num_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(hard_swish(self.norm(self.stem(x))))
        x = self.last(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return self.classes(hard_swish(x))  # type: ignore[no-any-return]


def images(count: int, size: int = 48) -> Tensor:
    """Smooth images with edges: energy falls with frequency, as in photos."""
    coarse = F.interpolate(torch.randn(count, 3, size // 8, size // 8), size=size, mode="bilinear")
    fine = F.interpolate(torch.randn(count, 3, size // 2, size // 2), size=size, mode="nearest")
    return coarse + 0.3 * fine + 0.5 * (coarse > 0.5)


class Spectrogram(nn.Module):
    """A short-time Fourier transform as two convolutions, magnitudes, bands and a small network."""

    def __init__(self, frame: int = 128, hop: int = 64, bands: int = 24) -> None:
        super().__init__()
        time, window = torch.arange(frame), torch.hann_window(frame)
        angle = 2 * math.pi * torch.arange(frame // 2 + 1)[:, None] * time / frame
        self.hop = hop
        self.register_buffer("cosine", (angle.cos() * window)[:, None])
        self.register_buffer("sine", (angle.sin() * window)[:, None])
        self.bands = nn.Conv1d(frame // 2 + 1, bands, 1)
        self.bands.weight.data.abs_()
        self.conv1, self.conv2 = nn.Conv1d(bands, 32, 3, padding=1), nn.Conv1d(32, 32, 3, padding=1)
        self.classes = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        real = F.conv1d(x, self.cosine, stride=self.hop)  # type: ignore[arg-type]
        imaginary = F.conv1d(x, self.sine, stride=self.hop)  # type: ignore[arg-type]
        magnitude = torch.sqrt(real * real + imaginary**2 + 1e-9)
        x = F.relu(self.conv1(torch.log1p(self.bands(magnitude).relu())))
        return self.classes(F.relu(self.conv2(x)).mean(-1))  # type: ignore[no-any-return]


def sounds(count: int, length: int = 4096) -> Tensor:
    """Decaying tones over faint noise: a few loud frames, many soft ones."""
    time = torch.arange(length) / 8000.0
    tones = torch.zeros(count, 1, length)
    for _ in range(4):
        pitch, start = 100 + 3000 * torch.rand(count, 1, 1) ** 2, torch.rand(count, 1, 1) * 0.3
        envelope = torch.exp(-(time - start).clamp(min=0) * 20) * (time >= start)
        tones += torch.rand(count, 1, 1) * envelope * torch.sin(2 * math.pi * pitch * time)
    return tones + 0.003 * torch.randn(count, 1, length)


class PostNormLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]


class PostNormEncoder(nn.Module):
    """Norms after the residual sums, some of whose gains are large: outlier channels, as in BERT."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(PostNormLayer(width, heads) for _ in range(layers)))
        self.classes = nn.Linear(width, 10)
        for name, parameter in self.named_parameters():
            if name.endswith("qkv.weight"):
                parameter.data *= 0.3  # attention that looks at more than one token, whatever the outliers
            if name.endswith(("norm1.weight", "norm2.weight")):
                parameter.data = 0.5 + torch.rand(width)
                parameter.data[[5, 40]] *= torch.tensor([10.0, 7.0])

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.layers(x).mean(1))  # type: ignore[no-any-return]


def tokens(count: int, length: int = 24, width: int = 64) -> Tensor:
    """Sequences of embeddings of a small vocabulary."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(200, width, generator=generator)
    rank = torch.distributions.Exponential(0.03).sample((count, length)).long().clamp(max=199)
    return table[rank]


class PowerLstm(nn.Module):
    """A recurrent layer over power spectra."""

    def __init__(self, bins: int = 65) -> None:
        super().__init__()
        self.lstm, self.classes = nn.LSTM(bins, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.lstm(x)
        return self.classes(found)  # type: ignore[no-any-return]


def power_spectra(count: int) -> Tensor:
    """Powers over five decades, most of them small."""
    frames = sounds(count, 2048).squeeze(1).unfold(-1, 128, 64)
    return torch.fft.rfft(frames * torch.hann_window(128)).abs().square()  # type: ignore[no-any-return]


def _case(make: Callable[[], nn.Module], data: Callable[[int], Tensor], batch: int, count: int) -> Case:
    torch.manual_seed(0)
    model = make()
    batches = [data(batch) for _ in range(count)]
    model.train()
    with torch.no_grad():
        for each in batches:
            model(each)  # batch norms see the data
    return Case(model.eval(), batches, [data(batch) for _ in range(6)])


NETS: dict[str, Callable[[], Case]] = {
    "hard-swish + squeeze-excite": lambda: _case(HardSwishNet, images, 8, 8),
    "spectrogram, magnitude": lambda: _case(Spectrogram, sounds, 8, 8),
    "post-norm encoder, outliers": lambda: _case(PostNormEncoder, tokens, 8, 8),
    "LSTM on power spectra": lambda: _case(PowerLstm, power_spectra, 8, 8),
}
