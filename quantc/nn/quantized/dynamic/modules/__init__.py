"""Modules that find scales as they run."""

from quantc.nn.quantized.dynamic.modules.attention import MultiheadAttention
from quantc.nn.quantized.dynamic.modules.conv import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from quantc.nn.quantized.dynamic.modules.linear import Linear
from quantc.nn.quantized.dynamic.modules.rnn import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNBase, RNNCell

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
