"""Quantized batch norms that could not be folded into what is before them."""

from torch import nn

from quantc.nn.float_fallback import InFloat


class BatchNorm2d(InFloat, nn.BatchNorm2d): ...


class BatchNorm3d(InFloat, nn.BatchNorm3d): ...


__all__ = ["BatchNorm2d", "BatchNorm3d"]
