"""Layers that belong together, for quantization aware training."""

from quantc.nn.intrinsic.qat.modules import *
from quantc.nn.intrinsic.qat.modules import __all__ as __all__
