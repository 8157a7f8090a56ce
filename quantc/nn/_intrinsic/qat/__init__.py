"""An older name of `quantc.nn.intrinsic.qat`."""

from quantc.nn.intrinsic.qat import *
from quantc.nn.intrinsic.qat import __all__ as __all__
