"""The modules of the eager flow, and the quantized tensor that they pass on."""

from quantc.nn import aten_ops, moves
from quantc.nn.module_tables import DYNAMIC_MODULES, QAT_MODULES, STATIC_MODULES
from quantc.nn.quantized_tensor import QuantizedTensor, quantize_per_channel, quantize_per_tensor
from quantc.nn.torch_state import torch_state_dict

__all__ = [
    "DYNAMIC_MODULES",
    "QAT_MODULES",
    "STATIC_MODULES",
    "QuantizedTensor",
    "aten_ops",
    "moves",
    "quantize_per_channel",
    "quantize_per_tensor",
    "torch_state_dict",
]
