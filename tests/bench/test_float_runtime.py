"""The float program on the runtime of a quantized one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.bench.float_runtime import in_float
from quantc.ir.program import Program

RUNTIMES = {"x86": "torch with norms folded", "onnx": "ONNX Runtime", "executorch": "ExecuTorch"}


@pytest.fixture(scope="module")
def captured() -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()).eval()
    return qc.capture(model, (torch.randn(1, 3, 6, 6),))


@pytest.mark.parametrize("target", RUNTIMES)
def test_it_computes_what_the_program_does(target: str, captured: Program) -> None:
    if target != "x86":
        pytest.importorskip("onnxruntime" if target == "onnx" else target)
    found = in_float(target, captured)
    x = torch.randn(1, 3, 6, 6)
    made: Tensor = found.model(x)
    assert found.runtime == RUNTIMES[target]
    torch.testing.assert_close(made, captured(x), atol=1e-4, rtol=1e-4)


def test_norms_are_folded_and_the_program_given_is_left_as_it_was(captured: Program) -> None:
    before = captured.dump()
    module = in_float("qnnpack", captured).model
    names = [str(node.target) for node in module.graph.nodes]
    assert not any("batch_norm" in name or "dropout" in name for name in names)
    assert captured.dump() == before
    assert any("batch_norm" in str(node.target) for node in captured.graph.nodes)
