"""The linear layer for quantization aware training."""

from torch import nn

from quantc.nn.qat_module import Trained


class Linear(Trained, nn.Linear): ...


__all__ = ["Linear"]
