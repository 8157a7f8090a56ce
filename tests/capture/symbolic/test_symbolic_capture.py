"""Capture by symbolic tracing: programs with and without example inputs, and the limits of their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from quantc.capture.leaf_modules import LeafSelector, leaf_selector
from quantc.capture.symbolic.symbolic_capture import trace
from quantc.errors import CaptureError
from quantc.ir.program import Program
from tests.support.edge_models import linear, module

X = torch.arange(8.0).reshape(2, 4)


def captured(model: nn.Module, *args: Any, shapes: Any = None, leaves: LeafSelector | None = None) -> Program:
    return trace(model, args or None, {}, dynamic_shapes=shapes, leaves=leaves or LeafSelector(frozenset(), ()))


@pytest.mark.parametrize("examples", [True, False])
def test_a_program_computes_what_the_model_does(examples: bool) -> None:
    model = module(lambda self, x: torch.relu(self.fc(x)), fc=linear)().eval()
    program = captured(model, *([X] if examples else []))
    assert (program.method, program.name, program.training) == ("fx", "Edge", False)
    assert torch.equal(program(X), model(X))
    kind = program.signature.inputs[0].type
    assert kind is None if not examples else kind is not None and kind.shape == (2, 4)


def test_open_sizes_keep_their_name_and_range() -> None:
    model = module(lambda self, x: x.reshape(-1))()
    program = captured(model, X, shapes={"x": {0: Dim("rows", min=2, max=16)}})
    assert dict(program.signature.ranges) == {"rows": (2, 16)}
    assert program(torch.ones(5, 4)).shape == (20,)


def test_a_limit_that_shows_in_the_graph_is_refused_and_one_that_does_not_is_ignored() -> None:
    def branches(self: nn.Module, x: Tensor) -> Tensor:
        torch._check(x.shape[0] >= 3)  # type: ignore[no-untyped-call]
        return x * 2

    shapes = {"x": {0: Dim("rows", min=1, max=16)}}
    with pytest.raises(CaptureError, match="at least 3"):
        captured(module(branches)(), torch.ones(4, 4), shapes=shapes)  # beyond the limit the model itself fails

    def chooses(self: nn.Module, x: Any) -> Any:
        """Asks for a size as a kernel does that has several ways to compute the same."""
        is_large = bool(x.shape[0].fake >= 3)
        return x * 2 if is_large else 2 * x

    plain = captured(module(chooses)(), torch.ones(4, 4), shapes=shapes)
    assert dict(plain.signature.ranges) == {"rows": (1, 16)}
    assert plain(torch.ones(1, 4)).shape == (1, 4)


def test_a_leaf_stays_whole_and_shapes_are_known_behind_it() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    model = module(lambda self, x: self.odd(x).reshape(x.shape[1], -1), odd=Odd)()
    program = captured(model, X, leaves=leaf_selector(model, (Odd,)))
    assert [str(node.target) for node in program.nodes() if node.op == "call_module"] == ["odd"]
    for given in (X, -X):
        assert torch.equal(program(given), model(given))


@pytest.mark.parametrize("training", [True, False])
def test_regions_without_gradients_are_lost_in_inference_and_kept_in_training(training: bool) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        with torch.no_grad():
            y = self.fc(x)
        return y * x

    program = captured(module(forward, fc=linear)().train(training), X)
    assert bool(program.inference_only) is not training


def test_buffers_that_share_memory_and_are_written_are_refused() -> None:
    class Shared(nn.Module):
        whole: Tensor
        part: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("whole", torch.zeros(4))
            self.register_buffer("part", self.whole[:2])

        def forward(self, x: Tensor) -> Tensor:
            self.whole.add_(x[0])
            return x[0, :2] + self.part

    with pytest.raises(CaptureError, match="shares memory"):
        captured(Shared(), X)
