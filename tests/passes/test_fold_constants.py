"""fold-constants: what is computed once, what must be computed each time, and that callers cannot tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.errors import ModeError
from quantc.hooks import Guard, Truth, Verify
from quantc.ir.program import Program
from quantc.passes.fold_constants import FoldConstants
from quantc.pipeline.pipeline import Pipeline
from tests.support.agree import fingerprint


def folded(model: nn.Module, *args: Tensor, options: FoldConstants | None = None) -> Program:
    before = fingerprint(model)
    program = qc.capture(model, args, method="fx")
    Pipeline((options or FoldConstants(),)).run(program, [Truth(), Verify(), Guard()])
    assert fingerprint(model) == before
    return program


def names(program: Program) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]


class Causal(nn.Module):
    """Attention scores with a mask made in `forward`, and a table of positions made from a buffer."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.arange(4.0))

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(4, 4).tril() == 0
        positions = torch.outer(self.steps, self.steps).sin() / 2
        return (x + positions).masked_fill(mask, float("-inf")).softmax(-1)


def test_masks_and_tables_are_computed_once() -> None:
    model, x = Causal().eval(), torch.randn(2, 4, 4)
    program = folded(model, x)
    assert names(program) == ["add", "masked_fill", "softmax"]
    assert torch.equal(program(x), model(x))
    assert not program.inference_only, "buffers are not trained"


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(4, 3))
        self.length = nn.Parameter(torch.rand(4, 1))

    def forward(self, x: Tensor) -> Any:
        weight = self.length * self.direction / self.direction.norm(dim=1, keepdim=True)
        return torch.nn.functional.linear(x, weight)


def test_folded_parameters_end_training() -> None:
    model, x = WeightNormed().eval(), torch.randn(2, 3)
    program = folded(model, x)
    assert names(program) == ["linear"]
    assert torch.equal(program(x), model(x))
    assert "direction" not in dict(program.module.named_parameters())
    with pytest.raises(ModeError, match="computed from a parameter once and for all"):
        program.train()


class Counting(nn.Module):
    count: Tensor
    wide: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))
        self.register_buffer("wide", torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        doubled = self.count * 2
        self.count.add_(1)
        sums = torch.zeros(3)
        sums.add_(self.wide)
        return x + doubled + self.count + sums


def test_what_is_written_to_is_no_constant() -> None:
    model, x = Counting().eval(), torch.randn(3)
    program, eager = folded(model, x), copy.deepcopy(model)
    for _ in range(3):
        assert torch.equal(program(x), eager(x))


class Returning(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Any:
        made = self.table.exp()
        return x + made, made, torch.zeros(3).view(3, 1)


def test_what_is_returned_belongs_to_the_caller() -> None:
    model, x = Returning().eval(), torch.randn(3)
    program = folded(model, x)
    for output in program(x):
        output.fill_(-1)
    for actual, expected in zip(program(x), model(x), strict=True):
        assert torch.equal(actual, expected)


class Random(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x + torch.full((64,), 0.5).bernoulli()


def test_random_numbers_are_drawn_anew() -> None:
    x = torch.zeros(64)
    program = folded(Random().eval(), x)
    assert not torch.equal(program(x), program(x))


class Expanded(nn.Module):
    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return x + self.one.neg().repeat(1024)


@pytest.mark.parametrize(("limit", "left"), [(0, ["repeat", "add"]), (4092, ["add"]), (4091, ["repeat", "add"])])
def test_growth_is_limited(limit: int, left: list[str]) -> None:
    program = folded(Expanded().eval(), torch.randn(1024), options=FoldConstants(max_growth_bytes=limit))
    assert names(program) == left


def test_a_program_without_its_constants_is_left_alone() -> None:
    program = qc.capture(WeightNormed().eval(), (torch.randn(2, 3),), method="fx")
    without = qc.parse(program.dump())
    assert not FoldConstants().run(without)
    assert FoldConstants().run(program)
