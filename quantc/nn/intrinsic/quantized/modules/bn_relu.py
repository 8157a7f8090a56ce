"""Quantized batch norms that end in a ReLU."""

from torch import nn

from quantc.nn.float_fallback import InFloat
from quantc.nn.intrinsic.modules import fused


class BNReLU2d(InFloat, nn.BatchNorm2d, fused=fused.BNReLU2d, relu=True): ...


class BNReLU3d(InFloat, nn.BatchNorm3d, fused=fused.BNReLU3d, relu=True): ...


__all__ = ["BNReLU2d", "BNReLU3d"]
