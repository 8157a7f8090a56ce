"""The linear layer with a ReLU, for quantization aware training."""

from torch import nn

from quantc.nn.intrinsic.modules import fused
from quantc.nn.intrinsic.modules.fused import _FusedModule
from quantc.nn.qat_module import Trained


class LinearReLU(Trained, nn.Linear, _FusedModule, fused=fused.LinearReLU, relu=True): ...


__all__ = ["LinearReLU"]
