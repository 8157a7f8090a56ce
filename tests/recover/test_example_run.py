"""One run tells the sizes and the indices."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.recover.example_run import ExampleRun


class Cut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0] * 2, -1)[torch.tensor([1, 0])]


def test_calls_are_repeated_with_another_operand() -> None:
    program = qc.capture(Cut().eval(), (torch.randn(2, 6),), method="fx")
    run = ExampleRun.of(program)
    assert isinstance(run, ExampleRun)
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and node in run.floats]
    source = nodes[0].all_input_nodes[0]
    assert tuple(run.shapes[nodes[0]]) == (4, 3)
    assert torch.equal(run.repeat(nodes[0], source, torch.arange(12).reshape(2, 6)), torch.arange(12).reshape(4, 3))
    assert torch.equal(run.repeat(nodes[1], nodes[0], torch.arange(12).reshape(4, 3))[0], torch.tensor([3, 4, 5]))


def test_there_is_none_without_example_inputs() -> None:
    program = qc.capture(Cut().eval(), (torch.randn(2, 6),), method="fx")
    program.example_inputs = None
    assert "no example inputs" in str(ExampleRun.of(program))
