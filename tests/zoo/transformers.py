"""Attention in its many spellings."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.case import Case, floats, tags, tokens


class ViTAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = ((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class ViTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = ViTAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.Sequential(*(ViTBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.position
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


class BertSelfAttention(nn.Module):
    """Shape arithmetic on `size()`, which must not be taken for tensor arithmetic."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def transpose_for_scores(self, x: Tensor) -> Any:
        shape = x.size()[:-1] + (self.heads, self.size)  # noqa: RUF005 - the spelling under test
        return x.view(shape).permute(0, 2, 1, 3)

    def forward(self, hidden: Tensor, mask: Tensor) -> Any:
        query = self.transpose_for_scores(self.query(hidden))
        key = self.transpose_for_scores(self.key(hidden))
        value = self.transpose_for_scores(self.value(hidden))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(self.size)
        weights = self.dropout(nn.functional.softmax(scores + mask, dim=-1))
        context = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous()
        shape = context.size()[:-2] + (self.heads * self.size,)  # noqa: RUF005
        return context.view(shape)


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = BertSelfAttention(width, heads)
        self.dense = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)

    def forward(self, hidden: Tensor, mask: Tensor) -> Any:
        hidden = self.norm1(self.dense(self.attention(hidden, mask)) + hidden)
        return self.norm2(self.down(F.gelu(self.up(hidden))) + hidden)


class Bert(nn.Module):
    positions: Tensor

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width, padding_idx=0)
        self.places = nn.Embedding(16, width)
        self.register_buffer("positions", torch.arange(16).expand((1, -1)), persistent=False)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(depth))
        self.pooler = nn.Linear(width, width)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask[:, None, None, :].to(self.norm.weight.dtype)
        mask = (1.0 - mask) * -10000.0
        hidden = self.norm(self.words(ids) + self.places(self.positions[:, : ids.size(1)]))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden, torch.tanh(self.pooler(hidden[:, 0]))


class CausalAttention(nn.Module):
    """The attention of the first GPT code bases: a mask buffer, `split`, `view`, `masked_fill`."""

    bias: Tensor

    def __init__(self, width: int = 32, heads: int = 4, longest: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Any:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(c, dim=2)
        q = q.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        k = k.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        v = v.view(b, t, self.heads, c // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class FlashAttention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(-2))


class GPTBlock(nn.Module):
    def __init__(self, attention: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = attention
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.act = nn.GELU(approximate="tanh")
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.proj(self.act(self.fc(self.ln_2(x))))


class RotaryLlama(nn.Module):
    """Rotary positions, RMS norm, grouped heads and a gated feed-forward."""

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2, longest: int = 16) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        angles = torch.outer(torch.arange(longest), 10000.0 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin(), persistent=False)
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.size, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def rotate(self, x: Tensor, length: int) -> Any:
        first, second = x[..., : self.size // 2], x[..., self.size // 2 :]
        return x * self.cos[:length] + torch.cat((-second, first), dim=-1) * self.sin[:length]

    def forward(self, x: Tensor) -> Any:
        b, t, _ = x.shape
        y = self.norm1(x)
        q = self.q(y).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(y).view(b, t, 2 * self.groups, self.size).transpose(1, 2).chunk(2, dim=1)
        repeats = self.heads // self.groups
        k = k[:, :, None].expand(b, self.groups, repeats, t, self.size).reshape(b, self.heads, t, self.size)
        v = v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(self.rotate(q, t), self.rotate(k, t), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` with its weights asked for, and without."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(width, 4, batch_first=True, dropout=0.1)
        self.second = nn.MultiheadAttention(width, 2, batch_first=True, bias=False)

    def forward(self, x: Tensor) -> Any:
        y, weights = self.first(x, x, x)
        z, _ = self.second(y, x, x, need_weights=False)
        return z, weights


class CrossAttention(nn.Module):
    """Different widths of keys and values, and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, kdim=8, vdim=12, batch_first=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Any:
        return self.attention(q, k, v, key_padding_mask=padding, need_weights=False)[0]


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, dim_feedforward=32, batch_first=True)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, norm_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(16, 4, dim_feedforward=32, batch_first=True)


FAST_PATH = "eager inference takes torch's fused attention kernel, which adds in another order"

CASES = (
    Case("vit", ViT, floats(3, 16, 16), tags=tags("attention", "train")),
    Case("bert", Bert, lambda b: (*tokens(8)(b), torch.ones(b, 8, dtype=torch.long).tril(5)), tags=tags("attention")),
    Case("gpt_masked", lambda: GPTBlock(CausalAttention()), floats(8, 32), tags=tags("attention")),
    Case("gpt_sdpa", lambda: GPTBlock(FlashAttention()), floats(8, 32), tags=tags("attention")),
    Case("rotary_llama", RotaryLlama, floats(8, 32), tags=tags("attention")),
    Case("multihead_attention", SelfAttention, floats(6, 16), tags=tags("attention")),
    Case(
        "cross_attention",
        CrossAttention,
        lambda b: (torch.randn(b, 5, 16), torch.randn(b, 7, 8), torch.randn(b, 7, 12), torch.rand(b, 7) > 0.8),
        tags=tags("attention"),
    ),
    Case("encoder_layer", encoder_layer, floats(6, 16), inexact=FAST_PATH, tags=tags("attention")),
    Case("encoder", encoder, floats(6, 16), inexact=FAST_PATH, tags=tags("attention")),
    Case(
        "decoder_layer",
        decoder_layer,
        lambda b: (torch.randn(b, 5, 16), torch.randn(b, 7, 16)),
        inexact=FAST_PATH,
        tags=tags("attention"),
    ),
)  # fmt: skip
