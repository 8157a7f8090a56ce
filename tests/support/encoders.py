"""Transformer encoders with random weights, initialised as their libraries do it: a ViT, and one like BERT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantc.bench.models import initialise, texts
from quantc.bench.networks import Layer, TextEncoder, ViT

__all__ = ["Layer", "TextEncoder", "ViT", "glorot", "images", "initialise", "texts"]


def glorot(model: nn.Module, seed: int = 0) -> nn.Module:
    """The same with the uniform distribution of Glorot for linear layers: wider, and no two values far apart."""
    initialise(model, seed)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
    return model


def images(count: int, batch: int, size: int, seed: int) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(batch, 3, size, size, generator=generator),) for _ in range(count)]
