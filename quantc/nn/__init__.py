"""The modules of the eager flow, and the quantized tensor that they pass on."""

from quantc.nn import aten_ops, moves
from quantc.nn.quantized_tensor import QuantizedTensor, quantize_per_channel, quantize_per_tensor

__all__ = ["QuantizedTensor", "aten_ops", "moves", "quantize_per_channel", "quantize_per_tensor"]
