"""Float modules of several steps, each with a place for an observer: they can be quantized statically."""

from quantc.nn.quantizable.attention import MultiheadAttention
from quantc.nn.quantizable.recurrent import LSTM, LSTMCell

__all__ = ["LSTM", "LSTMCell", "MultiheadAttention"]
