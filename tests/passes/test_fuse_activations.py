"""fuse-activations: what is recognised, in nested graphs too, and what the backends make of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import quantc as qc
from quantc.ir.dialect import is_op
from quantc.pipeline.pipeline import Pipeline


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        return self.conv2(x * F.relu6(x + 3) / 6)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "executorch", "onnx"])
def test_one_grid_holds_the_result_of_a_written_activation(backend: str) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 8, 8) for _ in range(3)]
    program = qc.prepare(qc.capture(Net().eval(), (batches[0],)), backend)
    (found,) = (node for node in program.graph.nodes if is_op(node, "hardswish"))
    assert not any(is_op(node, "mul", "clamp", "add") for node in program.graph.nodes)
    assert found.name in {site.node for group in program.plan.groups for site in group.values}
    qc.calibrate(program, batches)
    assert qc.compare(program, qc.convert(program), batches).sqnr > 30


def test_branches_are_rewritten_and_writes_are_not() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * torch.sigmoid(x), lambda x: x.sin(), (x,))  # type: ignore[no-any-return]

    class Writes(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            gate = torch.sigmoid(x)
            y.add_(1)
            return x * gate + y

    passes = Pipeline.parse("canonicalize,fuse-activations")
    assert any(is_op(node, "silu") for node in passes.run(qc.capture(Branch(), (torch.randn(4),))).nodes())
    kept = passes.run(qc.capture(Writes(), (torch.randn(4), torch.randn(4))))
    assert not any(is_op(node, "silu") for node in kept.nodes())
