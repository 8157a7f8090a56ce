"""Modules that find scales as they run."""

from quantc.nn.quantized.dynamic.modules import (
    GRU,
    LSTM,
    RNN,
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    GRUCell,
    Linear,
    LSTMCell,
    MultiheadAttention,
    RNNBase,
    RNNCell,
)

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "GRUCell",
    "LSTMCell",
    "Linear",
    "MultiheadAttention",
    "RNNBase",
    "RNNCell",
]
