"""Quantized layers with what follows them."""

from quantc.nn.intrinsic.quantized.modules import *
from quantc.nn.intrinsic.quantized.modules import __all__ as __all__
