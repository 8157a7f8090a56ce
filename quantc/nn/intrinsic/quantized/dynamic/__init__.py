"""Dynamically quantized fused layers."""

from quantc.nn.intrinsic.quantized.dynamic.modules import LinearReLU

__all__ = [
    "LinearReLU",
]
