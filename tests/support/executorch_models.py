"""Models for ExecuTorch, and how near its results are to those of the Q/DQ form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

import quantc as qc
from quantc.ir.program import Program
from quantc.qdq.ops import is_dequantize
from quantc.targets.executorch import Pte
from tests.support.backend_cases import Net

STEP = 1.001
"""One step of a grid; dequantized numbers are floats."""
NEAR = 1e-5


def net(forward: Any, **modules: nn.Module) -> nn.Module:
    return Net(forward, modules)


def image(batch: int = 2) -> Tensor:
    return torch.randn(batch, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def conv(inputs: int = 4, outputs: int = 4, kernel: int = 3, **options: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, **options})


def static(model: nn.Module, *inputs: Tensor, backend: str = "executorch", **options: Any) -> Program:
    """A model quantized with scales from its own inputs, in Q/DQ form."""
    return qc.quantize(model.eval(), inputs, [inputs], backend, **options).program


def without_data(model: nn.Module, *inputs: Tensor, mode: Any, config: qc.QuantConfig | None = None) -> Program:
    return qc.quantize(model.eval(), inputs, backend="executorch", mode=mode, config=config).program


def linear_layer(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=bias), nn.ReLU())


def weights_in(model: nn.Module, x: Tensor, mode: str, spec: qc.QuantSpec | None) -> Program:
    """A model quantized without data, with a spec for all."""
    return without_data(model, x, mode=mode, config=None if spec is None else qc.QuantConfig().set_all(spec))


def steps(quantized: Program, lowered: Pte, *inputs: Tensor) -> list[float]:
    """How many steps of its scale each output is from that of the Q/DQ form, at most; all outputs must be quantized."""
    (output,) = quantized.graph.find_nodes(op="output")
    pairs = zip(output.args[0], quantized.run_flat(inputs), lowered.run(*inputs), strict=True)
    return [float((got - want).abs().max()) / _scale(node) for node, want, got in pairs]


def _scale(node: fx.Node) -> float:
    assert is_dequantize(node)
    scale = node.args[1]
    assert isinstance(scale, float)
    return scale


def relative(want: Tensor, got: Tensor) -> float:
    return float((want.detach() - got).abs().max() / want.detach().abs().max())


def sqnr(want: Tensor, got: Tensor) -> float:
    exact = want.detach().double()
    noise = (exact - got.detach().double()).square().sum().clamp_min(1e-30)
    return float(10 * torch.log10(exact.square().sum() / noise))


class Counter(nn.Module):
    """Counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        counted: Tensor = self.layer(x) * 0 + self.calls
        return counted
