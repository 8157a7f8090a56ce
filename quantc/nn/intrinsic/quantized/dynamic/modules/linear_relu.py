"""The dynamically quantized linear layer with a ReLU."""

from typing import Any, ClassVar

from quantc.nn.intrinsic.modules import fused
from quantc.nn.quantized.dynamic.modules.linear import Linear


class LinearReLU(Linear):
    _FLOAT_MODULE: ClassVar[Any] = fused.LinearReLU
    relu = True


__all__ = ["LinearReLU"]
