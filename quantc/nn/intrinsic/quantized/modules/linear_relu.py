"""The quantized linear layer that ends in a ReLU."""

from __future__ import annotations

from torch import nn

from quantc.nn.intrinsic.modules import fused
from quantc.nn.quantized.modules.linear import _Linear


class LinearReLU(_Linear, of=nn.Linear, fused=fused.LinearReLU, relu=True): ...


__all__ = ["LinearReLU"]
