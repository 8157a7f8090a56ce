"""Small models between stubs, prepared, run and converted by the eager flow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantc.errors import QuantcError
from quantc.flows import eager


class Small(nn.Module):
    """Stubs, a convolution with its norm and ReLU, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = eager.QuantStub()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(4, 4)
        self.dequant = eager.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        x = self.relu(self.bn(self.conv(self.quant(x))))
        return self.dequant(self.fc(x.mean([2, 3])))


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
FUSE = [["conv", "bn", "relu"]]


def with_qconfig(model: nn.Module, qconfig: Any = None) -> nn.Module:
    vars(model)["qconfig"] = qconfig or eager.get_default_qconfig("fbgemm")
    return model


def small() -> nn.Module:
    torch.manual_seed(0)
    return with_qconfig(eager.fuse_modules(Small().eval(), FUSE))


def run(prepared: nn.Module) -> nn.Module:
    with torch.no_grad():
        prepared(X)
    return prepared


class Twice(nn.Module):
    """One linear layer, run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.quant = eager.QuantStub()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.dequant = eager.DeQuantStub()

    def forward(self, x: Tensor) -> Any:
        return self.dequant(self.fc(self.relu(self.relu(self.fc(self.quant(x))))))


def converted(model: nn.Module, *inputs: Any, engine: str = "fbgemm", **keywords: Any) -> Any:
    model = model.eval()
    if not hasattr(model, "qconfig"):
        vars(model)["qconfig"] = eager.get_default_qconfig(engine)
    prepared = eager.prepare(model, **keywords)
    prepared(*inputs)
    return eager.convert(prepared)


def check(error: QuantcError, path: str, *words: str) -> None:
    """An error names the place and says what to do."""
    assert error.where is not None
    assert path in error.where
    assert error.advice
    for word in words:
        assert word in str(error)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
