"""The linear layer with a batch norm, for quantization aware training."""

from torch import nn

from quantc.nn.intrinsic.modules import fused
from quantc.nn.intrinsic.modules.fused import _FusedModule
from quantc.nn.qat_module import TrainedNorm


class LinearBn1d(TrainedNorm, nn.Linear, _FusedModule, fused=fused.LinearBn1d, norm=nn.BatchNorm1d): ...


__all__ = ["LinearBn1d"]
