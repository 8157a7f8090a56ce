"""Nets whose channels may have factors: what makes and undoes them, and what passes them on. Each with the number of its
movable channel groups, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantc.ir.program import Program
from quantc.recover.channel_factors import apply
from quantc.recover.channel_groups import ChannelGroups

Case = tuple[nn.Module, Tensor, int]


class Inverted(nn.Module):
    """Expand, depthwise, project, with a residual: a block of MobileNetV2 with relu."""

    def __init__(self, width: int, out: int, act: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        hidden = width * 3
        self.body = nn.Sequential(
            nn.Conv2d(width, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            act(),
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            act(),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.is_residual = width == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.is_residual else y


def mobile() -> Case:
    """The stem with the residual block's output, two pairs in each block, the second block's output."""
    body = (nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Inverted(8, 8), Inverted(8, 12))
    head = (nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 5))
    return nn.Sequential(*body, *head), torch.randn(2, 3, 8, 8), 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.two(F.relu(self.one(x))))


def resnet() -> Case:
    """All that is added is one group; within each block there is one."""
    head = (nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), Residual(), Residual(), *head), torch.randn(2, 3, 10, 10), 3


class Mixed(nn.Module):
    """Grouped and transposed convolutions, channels joined, cut, shuffled and padded, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.c = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.up = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=2)
        self.last = nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4 * 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.a(x), 0.1)
        y = x + self.b(x)
        y = F.relu(torch.cat([y, self.c(y)], 1)[:, 4:12])
        y = self.up(F.pad(y, (1, 0, 1, 0)))
        left, right = F.channel_shuffle(F.interpolate(y, scale_factor=0.5), 3).chunk(2, 1)
        z = self.last(torch.maximum(left, right)).amax(3)
        result: Tensor = self.head(z.flatten(1))
        return result


def mixed() -> Case:
    return Mixed(), torch.randn(2, 3, 7, 7), 4


class Encoder(nn.Module):
    """Attention with heads that share keys and values, and a gated product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(16), nn.RMSNorm(16)
        self.q, self.kv, self.o = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.up, self.gate, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        samples, steps, _ = x.shape
        h = self.norm(x)
        k, v = (part.reshape(samples, steps, 2, 4).transpose(1, 2) for part in self.kv(h).chunk(2, -1))
        q = self.q(h).reshape(samples, steps, 4, 4).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(samples, steps, 16))
        h = self.norm_2(x)
        result: Tensor = x + self.down(self.up(h) * F.silu(self.gate(h)))
        return result


def encoder() -> Case:
    """Two gains, values to the output of attention, and one side of the gate."""
    return Encoder(), torch.randn(2, 5, 16), 4


class ByHand(nn.Module):
    """A norm of single ops, whose gain is a constant that multiplies last; products and quotients with constants."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(torch.randn(8)), nn.Parameter(torch.rand(8) + 1)
        self.table, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(1, 6, 8))
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, index: Tensor) -> Tensor:
        x = self.table(index) + self.places
        x = self.one(x)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.gain)
        result: Tensor = self.two(F.relu(x / self.shift).mean(1))
        return result


def by_hand() -> Case:
    """The table with the positions, the gain before the quotient, and what divides."""
    return ByHand(), torch.randint(0, 11, (3, 6)), 3


def sequence() -> Case:
    """Channels before the last axis, and three dimensions."""
    model = nn.Sequential(
        nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 6, 3, groups=6), nn.Upsample(scale_factor=2), nn.Conv1d(6, 5, 1),
        nn.Flatten(), nn.Linear(60, 3),
    )  # fmt: skip
    return model, torch.randn(2, 4, 10), 3


NETS: dict[str, Callable[[], Case]] = {
    "by hand": by_hand,
    "encoder": encoder,
    "mixed": mixed,
    "mobile": mobile,
    "resnet": resnet,
    "sequence": sequence,
}


def with_factors(program: Program, seed: int) -> tuple[Program, ChannelGroups]:
    """The program with a random power of two for each class."""
    other = program.clone()
    groups = ChannelGroups.of(other)
    powers = torch.randint(-3, 4, (groups.count,), generator=torch.Generator().manual_seed(seed))
    factors = torch.cat([torch.exp2(powers.double()), torch.ones(1, dtype=torch.float64)])
    assert apply(other, groups, factors).before or bool((factors == 1).all())
    return other, groups
