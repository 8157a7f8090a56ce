"""Programs written as text, with constants and example inputs that depend on their names and types alone."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from quantc.calibration.loop import calibrate
from quantc.calibration.observe_again import observe_again
from quantc.ir.program import Program
from quantc.ir.types import TensorType
from quantc.recover.transforming import SEE_AGAIN
from quantc.text.digests import constants
from quantc.text.parser import parse


def program_of(text: str) -> Program:
    """The program that a text says, with values for its constants and inputs."""
    blank = parse(text)
    values = {name: made(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in constants(blank).items()}
    program = parse(text, values)
    kinds = [(row.name, row.type) for row in program.signature.inputs]
    if all(kind is not None for _, kind in kinds):
        program.example_inputs = tuple(example(name, kind) for name, kind in kinds if kind is not None)
    return program


def inputs_of(program: Program) -> tuple[Tensor, ...]:
    """The example inputs of a program whose inputs have types."""
    assert program.example_inputs is not None
    return tuple(program.example_inputs)


def see(program: Program, collect: str | None = None) -> None:
    """Let a program see its example inputs; to collect statistics, others of their types beside them."""
    if program.is_live:
        program(*program.example_inputs or ())
    elif collect is None:
        calibrate(program, [program.example_inputs])
    else:
        calibrate(program, batches_of(program), collect=collect)


def batches_of(program: Program) -> list[tuple[Tensor, ...]]:
    """What a program is calibrated with."""
    return [_inputs(program, f"{number}") for number in range(BATCHES)]


@contextmanager
def seen_again() -> Iterator[None]:
    """Let transforms observe with the same batches what changes."""
    token = SEE_AGAIN.set(lambda program, names: observe_again(program, batches_of(program), names))
    try:
        yield
    finally:
        SEE_AGAIN.reset(token)


def _inputs(program: Program, seed: str) -> tuple[Tensor, ...]:
    kinds = [(row.name, row.type) for row in program.signature.inputs]
    return tuple(example(f"{name}{seed}", kind) for name, kind in kinds if kind is not None)


BATCHES = 4


SIZE = 2
"""Of a dimension that varies, in an example."""


def example(name: str, kind: TensorType) -> Tensor:
    return made(name, kind.dtype, tuple(size if isinstance(size, int) else SIZE for size in kind.shape))


def made(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    if name.endswith("var"):
        return torch.rand(shape, generator=generator).add(0.5).to(dtype)
    found = torch.randn(shape, generator=generator).to(dtype)
    if "spread" in name:  # rows of different size
        found *= torch.exp2(-2.0 * torch.arange(shape[0])).reshape(-1, *[1] * (len(shape) - 1))
    return found
