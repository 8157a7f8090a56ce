"""Gains go into the weights behind them, or before them; where they cannot, the reason says what is in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantc.recover.rotating import rotate_streams
from tests.support.streams import HIDDEN, captured, shaken


class Gained(nn.Module):
    """A norm with gain and offset between two linears, read in some way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(3, HIDDEN), nn.LayerNorm(HIDDEN)
        self.last, self.other = nn.Linear(HIDDEN, 3, bias=how != "no bias"), nn.Linear(HIDDEN, 3)
        self.image, self.scale = nn.Conv1d(HIDDEN, 3, 3, padding=1), nn.Parameter(torch.zeros(HIDDEN))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.read(x)
        return found

    def read(self, x: Tensor) -> Any:
        if self.how == "of the writer":
            hidden = self.scale * self.first(x).flip(1)  # a move between, or fuse would fold it
            return self.last(F.layer_norm(hidden + x.mean(), (HIDDEN,)))
        hidden = self.norm(self.first(x))
        if self.how == "by hand":
            return self.last(F.layer_norm(self.first(x), (HIDDEN,)) * self.scale + self.norm.bias)
        if self.how == "several":
            return self.last(hidden[:, :2]) + self.other(hidden.mean(1, keepdim=True))
        if self.how == "matmul":
            return hidden @ torch.stack([self.last.weight.T] * 2)
        if self.how == "padded":
            return self.image(hidden.transpose(1, 2))
        if self.how == "with itself":
            return (hidden @ hidden.transpose(1, 2)) @ x + self.other(hidden)
        if self.how == "scaled":
            return self.last(hidden * x.mean())
        if self.how == "activation":
            return self.last(torch.relu(hidden)) + self.other(hidden)
        return self.last(hidden)


@pytest.mark.parametrize("how", ["plain", "no bias", "several", "by hand", "of the writer"])
def test_gains_are_folded(how: str) -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    program = captured(shaken(Gained(how)), x)
    before = program(x).detach()
    found = rotate_streams(program, 0, "keep")
    assert any("vectors of 16" in each.reason and "1 gains folded" in each.reason for each in found)
    torch.testing.assert_close(program(x).detach(), before, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("matmul", "has no bias to take up the offset"),
        ("padded", "has no bias to take up the offset"),
        ("scaled", "has a gain, and mul reads it"),
        ("with itself", "has a gain that nothing can take"),
        ("activation", "is no linear function"),
    ],
)
def test_gains_that_stay(how: str, why: str) -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    program = captured(shaken(Gained(how)), x)
    before = program(x).detach()
    found = rotate_streams(program, 0, "keep")
    assert {each.fate for each in found} == {"refused"}
    assert why in "\n".join(each.reason for each in found)
    assert torch.equal(program(x).detach(), before)
