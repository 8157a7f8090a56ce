"""Modules for quantization aware training."""

from quantc.nn.qat import dynamic
from quantc.nn.qat.modules import (
    Conv1d,
    Conv2d,
    Conv3d,
    Embedding,
    EmbeddingBag,
    Linear,
)

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Embedding",
    "EmbeddingBag",
    "Linear",
    "dynamic",
]
