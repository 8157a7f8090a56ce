"""Modules for quantization aware training."""

from quantc.nn.qat.modules.conv import Conv1d, Conv2d, Conv3d
from quantc.nn.qat.modules.embedding_ops import Embedding, EmbeddingBag
from quantc.nn.qat.modules.linear import Linear

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "Embedding",
    "EmbeddingBag",
    "Linear",
]
