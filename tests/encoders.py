"""Transformer encoders with random weights, initialised as their libraries do it: a ViT, and one like BERT."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STD = 0.02


class Attention(nn.Module):
    """Attention written out, with one projection for queries, keys and values."""

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
    """Attention and feed-forward. Norms go before them in a ViT, and after the sums in BERT."""

    def __init__(self, width: int, heads: int, norm_first: bool) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def feed(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.up(x)))

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
    """An encoder of tokens like BERT, without a mask; by default half as deep as its base size."""

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


def initialised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights from a truncated normal distribution, biases zero; patches as torch initialises convolutions."""
    torch.manual_seed(seed)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.trunc_normal_(part.weight, std=STD)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=STD)
        elif isinstance(part, nn.Conv2d):
            part.reset_parameters()
    for name, parameter in model.named_parameters():
        if name in ("token", "position"):
            nn.init.trunc_normal_(parameter, std=STD)
    return model.eval()


def glorot(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same with the uniform distribution of Glorot for linear layers: wider, and no two values far apart."""
    initialised(model, seed)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
    return model


def images(count: int, batch: int, size: int, seed: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(batch, 3, size, size, generator=generator),) for _ in range(count)]


def texts(count: int, batch: int, length: int, words: int, seed: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randint(0, words, (batch, length), generator=generator),) for _ in range(count)]
