"""An older name of `quantc.nn.intrinsic`."""

from quantc.nn.intrinsic import *
from quantc.nn.intrinsic import __all__ as __all__
