"""Quantized fused layers."""

from quantc.nn.intrinsic.quantized.modules import *
from quantc.nn.intrinsic.quantized.modules import __all__ as __all__
