"""The linear layer for quantization aware training."""

from torch import nn

from quantc.nn.trained import Trained


class Linear(Trained, nn.Linear): ...


__all__ = ["Linear"]
