"""Training keeps the ops that compute a weight: they are no activations, and stay float."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import quantc as qc


class LowRank(nn.Module):
    """A linear layer whose weight is a product of two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.randn(4, 2))
        self.right = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x) @ (self.left.abs() @ self.right)


def test_a_product_of_parameters_is_not_annotated_in_training() -> None:
    program = qc.capture(LowRank(), (torch.randn(3, 4),))
    prepared = qc.prepare(program, "x86", qat=True, allow_empty=True)
    inner = next(node for node in prepared.nodes() if node.name == "matmul")
    assert "computes a weight from constants" in prepared.plan.left_float[inner]
    assert inner not in prepared.plan.claims
    assert not prepared.plan.outcomes, "neither factor has a scale"


def test_a_buffer_that_is_written_to_is_no_weight() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.ones(4, 4))
            self.total: Tensor

        def forward(self, x: Tensor) -> Tensor:
            seen = self.total @ self.total
            self.total.add_(x)
            return seen @ x

    prepared = qc.prepare(qc.capture(Running().eval(), (torch.randn(4, 4),)), "x86", allow_empty=True)
    reasons = [prepared.plan.left_float.get(node) or "" for node in prepared.nodes()]
    assert not any("from constants" in reason for reason in reasons)
