"""Batch norms behind convolutions and linears become part of their weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import ModeError
from quantc.flows.pt2e import (
    prepare_pt2e,
)
from tests.support.pt2e_small import captured, own

aten = torch.ops.aten


def test_a_norm_that_is_trained_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    with pytest.raises(ModeError, match="training mode"):
        prepare_pt2e(captured(model.train(), torch.randn(2, 3, 4, 4)), own())


class TwoNorms(nn.Module):
    """One convolution read through two norms, and one that is read beside its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.other = nn.Conv2d(3, 3, 1, bias=False)
        self.a, self.b, self.c = (nn.BatchNorm2d(3) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y = self.other(x)
        return self.a(self.conv(x)) + self.b(self.conv(2 * x)), self.c(y) * y


def test_norms_are_folded_where_that_is_right() -> None:
    """torchao folds all three: the second into nothing, the third for readers that do not want it."""
    torch.manual_seed(0)
    model = TwoNorms()
    for norm in (model.a, model.b, model.c):
        nn.init.uniform_(norm.weight, 0.5, 2)
        nn.init.uniform_(norm.running_mean, -1, 1)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 4, 4)
    prepared = prepare_pt2e(captured(model.eval(), x), own())
    with torch.no_grad():
        for found, expected in zip(prepared(x), model(x), strict=True):
            assert torch.allclose(found, expected, atol=1e-5)
    assert sum(node.target is aten.batch_norm.default for node in prepared.graph.nodes) == 1
