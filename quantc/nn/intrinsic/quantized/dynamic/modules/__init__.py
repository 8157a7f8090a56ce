"""Dynamically quantized fused layers."""

from quantc.nn.intrinsic.quantized.dynamic.modules.linear_relu import LinearReLU

__all__ = [
    "LinearReLU",
]
