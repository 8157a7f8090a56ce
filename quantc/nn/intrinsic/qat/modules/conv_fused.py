"""Convolutions fused with norm and activation, for quantization aware training."""

from torch import nn

from quantc.nn.intrinsic.modules import fused
from quantc.nn.intrinsic.modules.fused import _FusedModule
from quantc.nn.qat_module import Trained, TrainedNorm, freeze_bn_stats, update_bn_stats


class ConvReLU1d(Trained, nn.Conv1d, _FusedModule, fused=fused.ConvReLU1d, relu=True): ...


class ConvReLU2d(Trained, nn.Conv2d, _FusedModule, fused=fused.ConvReLU2d, relu=True): ...


class ConvReLU3d(Trained, nn.Conv3d, _FusedModule, fused=fused.ConvReLU3d, relu=True): ...


class ConvBn1d(TrainedNorm, nn.Conv1d, _FusedModule, fused=fused.ConvBn1d, norm=nn.BatchNorm1d): ...


class ConvBn2d(TrainedNorm, nn.Conv2d, _FusedModule, fused=fused.ConvBn2d, norm=nn.BatchNorm2d): ...


class ConvBn3d(TrainedNorm, nn.Conv3d, _FusedModule, fused=fused.ConvBn3d, norm=nn.BatchNorm3d): ...


class ConvBnReLU1d(
    TrainedNorm,
    nn.Conv1d,
    _FusedModule,
    fused=fused.ConvBnReLU1d,
    norm=nn.BatchNorm1d,
    relu=True,
    without_norm=fused.ConvReLU1d,
): ...


class ConvBnReLU2d(
    TrainedNorm,
    nn.Conv2d,
    _FusedModule,
    fused=fused.ConvBnReLU2d,
    norm=nn.BatchNorm2d,
    relu=True,
    without_norm=fused.ConvReLU2d,
): ...


class ConvBnReLU3d(
    TrainedNorm,
    nn.Conv3d,
    _FusedModule,
    fused=fused.ConvBnReLU3d,
    norm=nn.BatchNorm3d,
    relu=True,
    without_norm=fused.ConvReLU3d,
): ...


__all__ = [
    "ConvBn1d",
    "ConvBn2d",
    "ConvBn3d",
    "ConvBnReLU1d",
    "ConvBnReLU2d",
    "ConvBnReLU3d",
    "ConvReLU1d",
    "ConvReLU2d",
    "ConvReLU3d",
    "freeze_bn_stats",
    "update_bn_stats",
]
