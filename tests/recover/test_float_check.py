"""A check on the example inputs and on noise."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quantc.recover.float_check import FloatCheck
from tests.support.streams import captured


class Hinged(nn.Module):
    """Where inputs are positive, as the examples are, its parameter plays no part."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)


def test_noise_sees_what_the_examples_do_not() -> None:
    program = captured(Hinged().eval(), torch.rand(64) + 0.5)
    check = FloatCheck.of(program)
    assert check.gap() is None
    slope = program.tensor(program.graph.find_nodes(op="get_attr")[0])
    assert slope is not None
    with torch.no_grad():
        slope.fill_(0.75)
    assert torch.equal(program(torch.ones(64)), torch.ones(64))
    found = check.gap()
    assert found is not None
    assert "differs by" in str(found)


def test_tokens_stay_tokens() -> None:
    """Whole numbers are shuffled: any other might be no index."""
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)).eval()
    assert FloatCheck.of(captured(model, torch.tensor([[6, 0, 3]]))).gap() is None
