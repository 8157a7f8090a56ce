"""Quantized convolutions that end in a ReLU."""

from __future__ import annotations

from torch import nn

from quantc.nn.intrinsic.modules import fused
from quantc.nn.quantized.modules.conv import _ConvNd


class ConvReLU1d(_ConvNd, of=nn.Conv1d, fused=fused.ConvReLU1d, relu=True): ...


class ConvReLU2d(_ConvNd, of=nn.Conv2d, fused=fused.ConvReLU2d, relu=True): ...


class ConvReLU3d(_ConvNd, of=nn.Conv3d, fused=fused.ConvReLU3d, relu=True): ...


__all__ = ["ConvReLU1d", "ConvReLU2d", "ConvReLU3d"]
