"""One attempt at a capture: from a copy, without effects outside the model, and random draws of Python refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from quantc.capture.capture_attempt import attempt
from quantc.capture.capture_request import Request
from quantc.errors import CaptureError
from quantc.ir.types import tensor_type
from tests.support.edge_models import linear, module

X = torch.ones(2, 4)


def tried(model: nn.Module, method: str = "fx", *, examples: bool = True, **changes: Any) -> tuple[Any, list[str]]:
    given: dict[str, Any] = {"kwargs": {}, "dynamic_shapes": None, "leaf": (), **changes}
    return attempt(method, model, Request((X,) if examples else None, **given))


def test_the_program_computes_what_the_model_does_and_there_is_nothing_to_note() -> None:
    model = module(lambda self, x: torch.relu(self.fc(x)), fc=linear)()
    program, notes = tried(model)
    assert torch.equal(program(X), model(X))
    assert notes == []


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: torch.manual_seed(0).initial_seed()],
    ids=["random", "numpy", "seed"],
)
def test_draws_and_seeds_of_python_are_refused_and_leave_no_trace(draw: Any) -> None:
    model = module(lambda self, x: x * draw())()
    random.seed(7)
    expected, state = random.random(), torch.get_rng_state()
    random.seed(7)
    with pytest.raises(CaptureError, match="random"):
        tried(model)
    assert random.random() == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_the_caller_s_autocast_does_not_reach_the_program() -> None:
    model = module(lambda self, x: self.fc(x), fc=linear)()
    with torch.autocast("cpu", torch.bfloat16):
        program, _ = tried(model)
    kinds = [kind for node in program.nodes() if (kind := tensor_type(node)) is not None]
    assert {kind.dtype for kind in kinds} == {torch.float32}


class Counts(nn.Module):
    def __init__(self, matters: bool) -> None:
        super().__init__()
        self.calls, self.matters = 0, matters

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls if self.matters else x * 2


def test_attributes_that_change_are_noted_or_refused_and_the_model_keeps_its_own() -> None:
    harmless, harmful = Counts(False), Counts(True)
    _, notes = tried(harmless)
    assert len(notes) == 1
    assert "self.calls" in notes[0]
    with pytest.raises(CaptureError, match=r"self\.calls") as caught:
        tried(harmful)
    assert "register_buffer" in str(caught.value.advice)
    assert (harmless.calls, harmful.calls) == (0, 0)
    _, unchecked = tried(Counts(True), examples=False)
    assert "not checked" in unchecked[0]


def test_scripted_parts_are_for_symbolic_tracing_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.ReLU()))
    program, _ = tried(model)
    assert torch.equal(program(X), model(X))
    with pytest.raises(CaptureError, match="'1' is a TorchScript module"):
        tried(model, "export")


def test_what_a_model_raises_becomes_a_capture_error_with_its_line() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return x if float(x.sum()) > 0 else -x

    with pytest.raises(CaptureError) as caught:
        tried(module(forward)())
    assert Path(__file__).name in str(caught.value.where)


def test_a_leaf_that_names_no_module_is_refused() -> None:
    with pytest.raises(CaptureError, match="'fd'"):
        tried(module(lambda self, x: self.fc(x), fc=linear)(), leaf=("fd",))
