"""What the command line is given by the name of a Python object: models, factories of models, and batches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import quantc as qc
from quantc.ir.program import Program

HERE = __name__


class Two(nn.Module):
    """Two inputs by position."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.relu(a + b)


class Named(nn.Module):
    """Inputs by name alone."""

    def forward(self, *, x: Tensor, scale: Tensor) -> Tensor:
        return torch.relu(x) * scale


def plain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), (torch.ones(2, 4),)


alone = plain()[0]
named_alone = Named().eval()
number = 3


def complete() -> tuple[Any, ...]:
    """With batches."""
    return (*plain(), batches())


def with_attribute() -> nn.Module:
    model, inputs = plain()
    vars(model)["example_inputs"] = inputs
    return model


def named() -> tuple[nn.Module, dict[str, Tensor]]:
    return Named().eval(), {"x": torch.ones(2, 4), "scale": torch.ones(2, 1)}


def training() -> tuple[nn.Module, tuple[Tensor, ...]]:
    model, inputs = plain()
    return model.train(), inputs


def broken() -> None:
    raise ZeroDivisionError("there it is")


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 4, generator=generator) for _ in range(count)]


def stream() -> Iterator[Tensor]:
    yield from batches()


listed = batches()


@cache
def fixed() -> Program:
    """A program whose batch is 2."""
    model, inputs = plain()
    return qc.capture(model, inputs, dynamic_shapes=None)


@cache
def any_size() -> Program:
    """A program whose batch is open."""
    model, inputs = plain()
    return qc.capture(model, inputs)


@cache
def two() -> Program:
    return qc.capture(Two().eval(), (torch.ones(2, 4), torch.ones(2, 4)))


@cache
def quantized() -> Program:
    prepared = qc.prepare(any_size(), "x86")
    qc.calibrate(prepared, batches())
    return qc.convert(prepared)
