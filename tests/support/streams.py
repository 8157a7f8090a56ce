"""Small float64 models with a residual stream, for tests of transforms; each says what becomes of its streams."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc.ir.program import Program

HIDDEN, HEADS = 16, 4


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """With gains and offsets that are far from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() == 1:
                value.add_(torch.randn(value.shape, generator=generator) / 2)
    return model.double().eval()


def captured(model: nn.Module, *inputs: Tensor) -> Program:
    """Its inference program, in float64."""
    program = qc.capture(model, inputs, method="fx", dynamic_shapes=None)
    return qc.pipelines.inference().run_on_copy(program)


class DecomposedRms(nn.Module):
    """An RMS norm of elementwise ops; its gain is 1 + w."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normal * (1.0 + self.weight)


class Attention(nn.Module):
    """Four heads of queries, and two of keys and values, which are repeated."""

    def __init__(self, rotary: bool = False) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.k, self.v = nn.Linear(HIDDEN, HIDDEN // 2), nn.Linear(HIDDEN, HIDDEN // 2)
        self.register_buffer("phase", torch.rand(5, 4) if rotary else torch.ones(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (each.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for each in (k, v))
        scores = (q * self.phase) @ (k * self.phase).transpose(-1, -2) / 2.0
        out: Tensor = self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module], *, post: bool = False, rotary: bool = False) -> None:
        super().__init__()
        width = (HIDDEN,) if norm is not DecomposedRms else ()
        self.attention, self.post = Attention(rotary), post
        self.one, self.two = norm(*width), norm(*width)
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.one(x + self.attention(x))
            after: Tensor = self.two(x + self.down(F.gelu(self.up(x))))
            return after
        x = x + self.attention(self.one(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.two(x))))
        return out


class Language(nn.Module):
    """Tokens in, logits out."""

    def __init__(
        self, norm: type[nn.Module], *, tied: bool = False, post: bool = False, rotary: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, HIDDEN)
        self.positions = nn.Parameter(torch.randn(5, HIDDEN))
        self.blocks = nn.Sequential(*(Block(norm, post=post, rotary=rotary) for _ in range(2)))
        self.norm = norm(*(() if norm is DecomposedRms else (HIDDEN,))) if last else nn.Identity()
        self.head = nn.Linear(HIDDEN, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.blocks(self.table(tokens) + self.positions)))
        return out


TOKENS = torch.tensor([[1, 4, 2, 10, 7], [0, 3, 3, 9, 5]])


def language(norm: type[nn.Module] = nn.LayerNorm, **options: bool) -> Program:
    """The inference program of a shaken language model."""
    return captured(shaken(Language(norm, **options)), TOKENS)
