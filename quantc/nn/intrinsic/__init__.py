"""Float layers that belong together."""

from quantc.nn.intrinsic.modules import *
from quantc.nn.intrinsic.modules import __all__ as __all__
