"""Programs written as text, with constants and example inputs that depend on their names and types alone."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from quantc.calibration.loop import calibrate
from quantc.ir.program import Program
from quantc.ir.types import TensorType
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
        calibrate(program, [_inputs(program, f"{number}") for number in range(BATCHES)], collect=collect)


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
    return torch.randn(shape, generator=generator).to(dtype)
