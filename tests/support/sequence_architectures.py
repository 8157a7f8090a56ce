"""Networks over tokens, audio and categories: their true structure at small widths."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def split_heads(x: Any, heads: int) -> Any:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Any:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with rotary positions computed from integers, a causal mask, and the embedding for a head."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2, vocabulary: int = 96) -> None:
        super().__init__()
        self.size = width // heads
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(GPTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Any:
        length = ids.shape[1]
        places = torch.arange(length, device=ids.device)
        rates = 1.0 / (10000.0 ** (torch.arange(0, self.size, 2, device=ids.device) / self.size))
        angles = torch.cat([torch.outer(places, rates)] * 2, dim=-1)
        mask = places[:, None] >= places[None, :]
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, groups * size, bias=False), nn.Linear(width, groups * size, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        y = self.norm1(x)
        q, k, v = (
            split_heads(self.q(y), self.heads),
            split_heads(self.k(y), self.groups),
            split_heads(self.v(y), self.groups),
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """RMS norms, SwiGLU, grouped heads in torch's own attention, rotary tables as buffers."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 64, heads: int = 4, groups: int = 2, depth: int = 2) -> None:
        super().__init__()
        size = width // heads
        angles = torch.outer(torch.arange(32), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)
        self.words = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, groups) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 96, bias=False)

    def forward(self, ids: Tensor) -> Any:
        length = ids.shape[1]
        x = self.words(ids)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


class T5Attention(nn.Module):
    """Unscaled scores plus a bias learnt for each bucket of distance."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.buckets = nn.Embedding(16, heads)

    def bias(self, length: int, device: torch.device) -> Any:
        places = torch.arange(length, device=device)
        distance = places[None, :] - places[:, None]
        side = (distance > 0).to(torch.long) * 8
        distance = distance.abs()
        far = 4 + (torch.log(distance.float() / 4 + 1e-6) / math.log(32 / 4) * 4).to(torch.long)
        bucket = side + torch.where(distance < 4, distance, torch.clamp(far, max=7))
        return self.buckets(bucket).permute(2, 0, 1).unsqueeze(0)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (split_heads(part(x), self.heads) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2)) + self.bias(x.shape[1], x.device)
        y = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(scores), v)
        return self.o(y.transpose(1, 2).contiguous().flatten(2))


class T5(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(64, width)
        self.attentions = nn.ModuleList(T5Attention(width, heads) for _ in range(depth))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(2 * depth + 1))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(depth))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width, bias=False) for _ in range(depth))

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for n, (attention, up, down) in enumerate(zip(self.attentions, self.ups, self.downs, strict=True)):
            x = x + attention(self.norms[2 * n](x))
            x = x + down(F.relu(up(self.norms[2 * n + 1](x))))
        return self.norms[-1](x)


class CrossBlock(nn.Module):
    """A decoder layer: causal self-attention, attention to the encoder, feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.q, self.kv = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.out, self.cross_out = nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, audio: Tensor) -> Any:
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        k, v = (split_heads(part, self.heads) for part in self.kv(audio).chunk(2, -1))
        q = split_heads(self.q(self.norms[1](x)), self.heads)
        x = x + self.cross_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[2](x))


class Whisper(nn.Module):
    """Two convolutions over a spectrogram, an encoder layer, and a decoder layer over tokens."""

    places: Tensor

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(20, width, 3, padding=1), nn.Conv1d(width, width, 3, stride=2, padding=1)
        rates = torch.exp(-math.log(10000.0) / (width // 2 - 1) * torch.arange(width // 2))
        angles = torch.arange(32)[:, None] * rates[None, :]
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], dim=1))
        self.encoder = nn.TransformerEncoderLayer(
            width, heads, 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.words, self.positions = nn.Embedding(64, width), nn.Parameter(torch.randn(12, width) * 0.1)
        self.decoder, self.norm = CrossBlock(width, heads), nn.LayerNorm(width)

    def forward(self, audio: Tensor, ids: Tensor) -> Any:
        x = F.gelu(self.conv2(F.gelu(self.conv1(audio)))).permute(0, 2, 1)
        x = self.encoder(x + self.places[: x.shape[1]])
        y = self.words(ids) + self.positions[: ids.shape[-1]]
        return self.norm(self.decoder(y, x)) @ self.words.weight.t()


class Conformer(nn.Module):
    """One block: half a feed-forward, attention, a gated depthwise convolution, the other half."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.first, self.second = self.feed_forward(width), self.feed_forward(width)
        self.norm_attention, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm_conv, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.conv = nn.Sequential(
            nn.Conv1d(width, 2 * width, 1), nn.GLU(dim=1), nn.Conv1d(width, width, 15, padding=7, groups=width),
            nn.BatchNorm1d(width), nn.SiLU(), nn.Conv1d(width, width, 1),
        )  # fmt: skip

    @staticmethod
    def feed_forward(width: int) -> nn.Sequential:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Any:
        x = x + 0.5 * self.first(x)
        y = self.norm_attention(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.conv(self.norm_conv(x).transpose(1, 2)).transpose(1, 2)
        return self.norm(x + 0.5 * self.second(x))


class EinsumAttention(nn.Module):
    """Attention spelt with einsum, projections too."""

    def __init__(self, width: int = 48, heads: int = 4) -> None:
        super().__init__()
        size = width // heads
        self.norm = nn.LayerNorm(width)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(width, heads, size) / width**0.5) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, size, width) / width**0.5)

    def forward(self, x: Tensor) -> Any:
        y = self.norm(x)
        q, k, v = (torch.einsum("btc,chd->bhtd", y, w) for w in (self.wq, self.wk, self.wv))
        weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
        return x + torch.einsum("bhtd,hdc->btc", torch.einsum("bhij,bhjd->bhid", weights, v), self.wo)


class WaveNet(nn.Module):
    """Dilated causal convolutions with gates; what each layer skips is summed up."""

    def __init__(self, width: int = 16, depth: int = 5) -> None:
        super().__init__()
        self.start = nn.Conv1d(8, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**n) for n in range(depth))
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2**n) for n in range(depth))
        self.residuals = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.skips = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(depth))
        self.end1, self.end2 = nn.Conv1d(2 * width, 2 * width, 1), nn.Conv1d(2 * width, 8, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.start(x)
        total: Any = 0
        for n, (filter_, gate) in enumerate(zip(self.filters, self.gates, strict=True)):
            padded = F.pad(x, (2**n, 0))
            y = torch.tanh(filter_(padded)) * torch.sigmoid(gate(padded))
            total = total + self.skips[n](y)
            x = x + self.residuals[n](y)
        return self.end2(F.relu(self.end1(F.relu(total))))


class DLRM(nn.Module):
    """Bags of categories and a few numbers: every pair of their vectors interacts."""

    rows: Tensor
    columns: Tensor

    def __init__(self, fields: int = 4, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, width, mode="sum") for _ in range(fields))
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        pairs = torch.tril_indices(fields + 1, fields + 1, -1)
        self.register_buffer("rows", pairs[0])
        self.register_buffer("columns", pairs[1])
        self.top = nn.Sequential(nn.Linear(width + len(pairs[0]), 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, ids: Tensor) -> Any:
        x = self.bottom(dense)
        vectors = [x] + [bag(ids[:, n]) for n, bag in enumerate(self.bags)]
        stacked = torch.stack(vectors, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.rows, self.columns]], dim=1))
