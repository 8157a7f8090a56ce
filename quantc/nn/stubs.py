"""The boundaries of the quantized parts of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from quantc.nn.qconfig import QConfigAny


class _Stub(nn.Module):
    """Identity, until `convert` swaps it."""

    def __init__(self, qconfig: QConfigAny = None) -> None:
        super().__init__()
        if qconfig is not None:
            vars(self)["qconfig"] = qconfig

    def forward(self, x: Any) -> Any:
        return x


class QuantStub(_Stub):
    """Boundary into a quantized part: observes float tensors, and becomes `quantc.nn.quantized.Quantize`."""


class DeQuantStub(_Stub):
    """Boundary out of a quantized part: becomes `quantc.nn.quantized.DeQuantize`."""


class QuantWrapper(nn.Module):
    """A module between a QuantStub and a DeQuantStub, for modules of one input and one output."""

    quant: QuantStub
    dequant: DeQuantStub
    module: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        qconfig = getattr(module, "qconfig", None)
        self.quant = QuantStub(qconfig)
        self.dequant = DeQuantStub(qconfig)
        self.module = module
        self.train(module.training)

    def forward(self, X: Any) -> Any:  # noqa: N803 - the name users know
        return self.dequant(self.module(self.quant(X)))
