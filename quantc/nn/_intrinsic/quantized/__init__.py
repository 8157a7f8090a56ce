"""An older name of `quantc.nn.intrinsic.quantized`."""

from quantc.nn.intrinsic.quantized import *
from quantc.nn.intrinsic.quantized import __all__ as __all__
