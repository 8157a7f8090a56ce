"""Small models, exported, and taken through the PT2 export flow with the quantizers of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from quantc.flows.pt2e import (
    QNNPackQuantizer,
    X86Quantizer,
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
    prepare_pt2e,
)
from quantc.flows.pt2e.backend_quantizer import BackendQuantizer
from quantc.flows.pt2e.x86_inductor_quantizer import get_default_x86_inductor_quantization_config
from tests.support.oracle_models import Residual, Subject
from tests.support.oracles import decomposed

RESIDUAL = Subject("residual", Residual, (2, 3, 16, 16))


def own(**choices: Any) -> XNNPACKQuantizer:
    return XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True, **choices))


def captured(model: nn.Module, *inputs: Tensor, strict: bool = False) -> Any:
    return torch.export.export(model, inputs, strict=strict).module()


def calibrated(model: nn.Module, quantizer: Any, *batches: Tensor) -> fx.GraphModule:
    prepared = prepare_pt2e(captured(model, batches[0]), quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(batch)
    return prepared


def nodes(module: fx.GraphModule, verb: str) -> list[fx.Node]:
    return [node for node in module.graph.nodes if decomposed(node, verb)]


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


SYMMETRIC = get_symmetric_quantization_config(is_per_channel=True)


def by_name(name: str) -> BackendQuantizer:
    """A quantizer with its default config."""
    if name == "x86":
        return X86Quantizer().set_global(get_default_x86_inductor_quantization_config())
    return (XNNPACKQuantizer() if name == "xnnpack" else QNNPackQuantizer()).set_global(SYMMETRIC)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x))
        return y.relu() + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.fc(self.second(self.first(x)).mean((2, 3)))
