"""Quantized normalizations."""

from torch import nn

from quantc.nn.float_fallback import InFloat


class LayerNorm(InFloat, nn.LayerNorm): ...


class GroupNorm(InFloat, nn.GroupNorm, leading=2): ...


class InstanceNorm1d(InFloat, nn.InstanceNorm1d): ...


class InstanceNorm2d(InFloat, nn.InstanceNorm2d): ...


class InstanceNorm3d(InFloat, nn.InstanceNorm3d): ...


__all__ = ["GroupNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "LayerNorm"]
