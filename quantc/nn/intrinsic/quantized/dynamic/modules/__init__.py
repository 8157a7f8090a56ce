"""Layers with what follows them, that find scales as they run."""

from quantc.nn.intrinsic.quantized.dynamic.modules.linear_relu import LinearReLU

__all__ = [
    "LinearReLU",
]
