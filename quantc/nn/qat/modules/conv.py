"""Convolutions for quantization aware training."""

from torch import nn

from quantc.nn.qat_module import Trained


class Conv1d(Trained, nn.Conv1d): ...


class Conv2d(Trained, nn.Conv2d): ...


class Conv3d(Trained, nn.Conv3d): ...


__all__ = ["Conv1d", "Conv2d", "Conv3d"]
