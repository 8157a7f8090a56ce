"""Small programs of many ops, at any stage: what passes, quantizers and targets are checked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quantc import pipelines
from quantc.calibration.loop import calibrate
from quantc.ir.program import Program, Stage
from quantc.testing.rule_trial import FACTORS, scale_inputs
from quantc.verbs.capture import capture
from quantc.verbs.convert import convert
from quantc.verbs.prepare import prepare

Example: TypeAlias = "Callable[[], Program | tuple[nn.Module, tuple[Any, ...]]]"
"""Makes a model: a module with its example inputs, or a program."""
BACKEND = "x86"
"""The backend that brings programs to later stages."""


class Residual(nn.Module):
    """Convolutions with norms, a sum, a join and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 8, 1, bias=False)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.relu(self.norm(self.left(x)) + x)
        z = torch.cat([y, nn.functional.hardswish(self.right(y))], 1)
        return torch.softmax(self.head(nn.functional.max_pool2d(z, 2).mean((2, 3))), -1)


class Attention(nn.Module):
    """An encoder block, with views, a norm and two products of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        scores = torch.softmax(q @ k.transpose(-2, -1) * 0.5, -1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(-2))
        made: Tensor = x + self.mlp(x)
        return made


class Curves(nn.Module):
    """Activations, clamps and arithmetic with constants, some of them twice, one result unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(torch.relu(self.first(x)))
        torch.tanh(y)
        z = torch.sigmoid(self.second(y) + self.shift) * nn.functional.silu(y)
        return torch.clamp(z, 0, 6), (y + 0) * 2.0


class Branches(nn.Module):
    """Nested graphs, a dropout, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(5, 5), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.layer(self.layer(x)))
        made: Tensor = torch.cond(x.sum() > 0, lambda y: torch.relu(y) + 1, lambda y: torch.tanh(y).abs(), (y,))
        return made


def modules() -> dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]]:
    """The examples by name."""
    return {
        "residual": lambda: (_settled(Residual()), (torch.randn(4, 3, 8, 8),)),
        "attention": lambda: (Attention(), (torch.randn(4, 5, 8),)),
        "curves": lambda: (Curves(), (torch.randn(4, 6),)),
        "branches": lambda: (Branches(), (torch.randn(4, 5),)),
    }


def _settled(model: nn.Module) -> nn.Module:
    """With the running statistics of a trained model."""
    for each in model.modules():
        if isinstance(each, nn.BatchNorm2d) and each.running_mean is not None and each.running_var is not None:
            each.running_mean.normal_()
            each.running_var.uniform_(0.5, 2.0)
    return model


@cache
def _captured(name: str) -> Program:
    return as_program(modules()[name])


def as_program(make: Example) -> Program:
    """The captured program of an example."""
    made = make()
    if isinstance(made, Program):
        return made
    module, inputs = made
    return capture(module.eval(), inputs)


def float_programs(more: Mapping[str, Example] | None = None) -> Iterator[tuple[str, Program]]:
    """Captured programs by name: the examples, then those that are given."""
    yield from ((name, _captured(name).clone()) for name in modules())
    yield from ((name, as_program(make)) for name, make in (more or {}).items())


def programs_at(
    needs: Stage, before: Stage | None, more: Mapping[str, Example] | None = None
) -> Iterator[tuple[str, Program]]:
    """Programs at every stage from `needs` on that lies before another, brought there for x86."""
    known = [(name, _stages_of(name)) for name in modules()]
    given = [(name, tuple(_stages(as_program(make)))) for name, make in (more or {}).items()]
    for name, stages in [*known, *given]:
        for program in stages:
            if program.stage >= needs and (before is None or program.stage < before):
                yield f"{name}, {program.stage.label}", program.clone()


def feed(prepared: Program) -> Program:
    """Calibrate a prepared program with batches like its example inputs, of both signs: both branches are taken."""
    inputs = prepared.example_inputs or ()
    calibrate(prepared, [tuple(scale_inputs(inputs, factor)) for factor in (*FACTORS, -1.0)])
    return prepared


@cache
def _stages_of(name: str) -> tuple[Program, ...]:
    return tuple(_stages(_captured(name)))


def _stages(program: Program) -> Iterator[Program]:
    """A program at one stage after the other."""
    yield program
    yield pipelines.inference().run_on_copy(program)
    prepared = prepare(program, BACKEND, allow_empty=True)
    yield prepared.clone()
    calibrated = feed(prepared)
    yield calibrated
    converted = convert(calibrated)
    yield converted
    yield pipelines.integer().run_on_copy(converted)


__all__ = ["Example", "as_program", "feed", "float_programs", "modules", "programs_at"]
