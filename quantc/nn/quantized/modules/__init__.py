"""Quantized modules, by the names of their float ones."""

from torch.nn import MaxPool2d

from quantc.nn.quantized.modules.activation import (
    CELU,
    ELU,
    GELU,
    Hardswish,
    LeakyReLU,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from quantc.nn.quantized.modules.batchnorm import BatchNorm2d, BatchNorm3d
from quantc.nn.quantized.modules.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from quantc.nn.quantized.modules.dropout import Dropout
from quantc.nn.quantized.modules.embedding_ops import Embedding, EmbeddingBag
from quantc.nn.quantized.modules.functional_modules import FloatFunctional, FXFloatFunctional, QFunctional
from quantc.nn.quantized.modules.linear import DeQuantize, Linear, Quantize
from quantc.nn.quantized.modules.normalization import (
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
)
from quantc.nn.quantized.modules.stepwise import LSTM, MultiheadAttention

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "LSTM",
    "BatchNorm2d",
    "BatchNorm3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "DeQuantize",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "FXFloatFunctional",
    "FloatFunctional",
    "GroupNorm",
    "Hardswish",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "MultiheadAttention",
    "PReLU",
    "QFunctional",
    "Quantize",
    "ReLU",
    "ReLU6",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
]
