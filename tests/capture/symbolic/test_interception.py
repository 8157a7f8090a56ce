"""Patches of a trace: no call escapes it, and nothing is patched behind it."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.capture.export.dimensions import DynamicDim
from quantc.capture.refused_trace import RefusedError
from quantc.capture.symbolic.interception import seeds_refused
from tests.support.symbolic_traces import traced

X = torch.ones(2, 3)
ROWS = {(0, 0): DynamicDim("rows", 2, None)}


def test_everything_is_as_it_was_after_a_trace_and_after_a_refusal() -> None:
    watched = [
        (builtins, "isinstance"), (torch, "zeros"), (torch, "_check"), (nn.Module, "__setattr__"),
        (torch.autocast, "__enter__"), (torch.nn.functional, "has_torch_function_unary"),
    ]  # fmt: skip
    before = [getattr(owner, name) for owner, name in watched]
    traced(lambda s, x: torch.relu(x), X)
    with pytest.raises(RefusedError):
        traced(lambda s, x: x if x.sum() > 0 else -x, X)
    assert [getattr(owner, name) for owner, name in watched] == before


def test_a_model_that_asks_what_a_value_is_gets_the_answer_of_eager() -> None:
    def forward(self: Any, x: Any) -> Any:
        answers = [isinstance(value, kind) for value, kind in ((x, Tensor), (x, int | list), (x.shape[0], int))]
        assert answers == [True, False, True]
        return x + 1

    assert traced(forward, X).names == ["add.Tensor"]
    assert traced(forward, X, marks=ROWS).names[-1] == "add.Tensor"


def test_tensors_made_in_forward_are_part_of_the_graph() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x + torch.ones(x.shape[0], 1) * torch.arange(3)

    trace = traced(forward, X, marks=ROWS)
    assert {"ones.default", "arange.default"} <= set(trace.names)
    for count in (2, 4):
        assert torch.equal(trace(torch.zeros(count, 3)), forward(None, torch.zeros(count, 3)))


def test_functions_of_torch_in_python_are_followed_to_their_ops() -> None:
    trace = traced(lambda s, x: torch.nn.functional.softmax(torch.nn.functional.dropout(x, 0.5, False), -1), X)
    assert trace.names[-1] == "softmax.int"


def test_regions_that_choose_dtypes_are_refused_and_disabled_ones_are_not() -> None:
    def forward(self: Any, x: Tensor, enabled: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return x @ x.T

    with pytest.raises(RefusedError, match="autocast"):
        traced(lambda s, x: forward(s, x, True), X)
    trace = traced(lambda s, x: forward(s, x, False), X)
    assert trace(X).dtype == torch.float32


def test_checks_of_sizes_hold_in_the_trace_and_checks_of_data_are_refused() -> None:
    def sized(self: Any, x: Tensor) -> Tensor:
        torch._check(x.shape[0] > 1)  # type: ignore[no-untyped-call]
        return x + 1

    assert traced(sized, X, marks=ROWS).names[-1] == "add.Tensor"

    def valued(self: Any, x: Tensor) -> Tensor:
        torch._check(x.sum() > 1)  # type: ignore[no-untyped-call]
        return x + 1

    with pytest.raises(RefusedError, match="depends on the data"):
        traced(valued, X)


def test_a_pool_takes_the_sizes_that_are_left_out_from_its_input() -> None:
    trace = traced(lambda s, x: s.pool(x), torch.ones(1, 2, 6, 4), pool=lambda: nn.AdaptiveAvgPool2d((3, None)))
    assert trace(torch.ones(1, 2, 6, 4)).shape == (1, 2, 3, 4)


def test_assignments_to_buffers_are_stored_and_other_attributes_are_python_s() -> None:
    class Held(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

    def forward(self: Any, x: Tensor) -> Any:
        self.held.total = self.held.total + x[0]
        self.last = x[0]
        last = self.last
        del self.last
        return self.held.total + last

    trace = traced(forward, X, held=Held)
    assert trace.names[-1] == "copy_.default"
    assert torch.equal(trace(X), torch.full((3,), 2.0))


def test_seeds_are_refused_inside_their_context_alone() -> None:
    with seeds_refused():
        for seed in (torch.manual_seed, torch.random.manual_seed):
            with pytest.raises(RefusedError, match="seed"):
                seed(0)
        with pytest.raises(RefusedError, match="seed"):
            torch.seed()
    torch.manual_seed(0)
