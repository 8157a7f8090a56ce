"""An older name of `quantc.nn.intrinsic.qat.modules`."""

from quantc.nn.intrinsic.qat.modules import *
from quantc.nn.intrinsic.qat.modules import __all__ as __all__
