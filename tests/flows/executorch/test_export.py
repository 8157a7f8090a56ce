"""Capturing a model under the names it had in ExecuTorch's documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from quantc.errors import CaptureError, QuantcError
from quantc.flows.executorch import exir
from quantc.flows.executorch.export import capture_pre_autograd_graph


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor, *, twice: bool = False) -> Any:
        y = self.fc(x)
        return y * 2 if twice else y


X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def test_the_graph_computes_what_the_model_does_in_aten_ops() -> None:
    model = Net().eval()
    graph = capture_pre_autograd_graph(model, (X,))
    assert isinstance(graph, fx.GraphModule)
    assert torch.equal(graph(X), model(X))
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [str(node.target) for node in calls] == ["aten.linear.default"]


def test_keywords_are_captured_as_they_are_given() -> None:
    model = Net().eval()
    graph = capture_pre_autograd_graph(model, (X,), {"twice": True})
    assert torch.equal(graph(X, twice=True), model(X, twice=True))


def test_sizes_are_open_where_asked() -> None:
    model = Net().eval()
    graph = capture_pre_autograd_graph(model, (X,), dynamic_shapes=({0: torch.export.Dim.AUTO}, None)[:1])
    assert graph(torch.randn(7, 3)).shape == (7, 2)


def test_a_model_that_cannot_be_captured_is_refused_with_the_line() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(CaptureError, match=r"test_export\.py"):
        capture_pre_autograd_graph(Branches(), (X,))


@pytest.mark.parametrize(("model", "args"), [("not a model", (X,)), (Net(), X)])
def test_what_is_no_model_or_no_tuple_is_refused(model: Any, args: Any) -> None:
    with pytest.raises(QuantcError):
        capture_pre_autograd_graph(model, args)


def test_the_other_name_is_the_same_function() -> None:
    assert exir.capture is capture_pre_autograd_graph
