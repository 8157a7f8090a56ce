"""A program's text in a file, with its tensors beside it.

    program.txt                  the text
    program.safetensors          its constants; without them the program is read onto the meta device
    program.inputs.safetensors   its example inputs, for running it and for the numeric guard

All three are sealed: damaged files are refused. Reading them executes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantc.errors import LoadError
from quantc.files import sealed_tensors
from quantc.files.atomic_file import write_text
from quantc.files.regular_file import read_text as read_file
from quantc.files.sealed_tensors import FileKind
from quantc.files.sealed_text import sealed_text, unsealed_text
from quantc.ir.program import Program
from quantc.text.digests import constants
from quantc.text.parser import parse

VERSION = 1
TENSORS = FileKind("quantc.tensors", (VERSION,), "tensors of a dump", "write it again, or remove it")


@dataclass(frozen=True)
class Snapshot:
    """A program at one moment: its text and the tensors it refers to, which are not copied."""

    text: str
    constants: Mapping[str, torch.Tensor]
    inputs: tuple[Any, ...] | None

    @staticmethod
    def of(program: Program) -> Snapshot:
        return Snapshot(program.dump("text"), constants(program), program.example_inputs)

    def write(self, path: Path) -> None:
        """Write the text to `path` and the tensors beside it."""
        write_text(path, sealed_text(self.text))
        if not any(tensor.is_meta for tensor in self.constants.values()):
            _write_tensors(constants_file(path), self.constants)
        leaves = {str(i): leaf for i, leaf in enumerate(self.inputs or ()) if isinstance(leaf, torch.Tensor)}
        if self.inputs is not None:
            _write_tensors(inputs_file(path), leaves)


def read_text(path: Path) -> Program:
    """The program of a text file, with the constants and example inputs stored beside it."""
    try:
        text = unsealed_text(read_file(path, "give a file that program.dump() wrote"))
    except LoadError as error:
        told = error.what if error.where else f"{path} cannot be read: {error.what}"
        raise LoadError(told, where=str(path), advice=error.advice) from error
    tensors = _read_tensors(constants_file(path)) if constants_file(path).exists() else None
    program = parse(text, tensors)
    if inputs_file(path).exists():
        program.example_inputs = _inputs(program, _read_tensors(inputs_file(path)), inputs_file(path))
    return program


def constants_file(path: Path) -> Path:
    """The path of the constants of a text file."""
    return path.with_suffix(".safetensors")


def inputs_file(path: Path) -> Path:
    """The path of the example inputs of a text file."""
    return path.with_suffix(".inputs.safetensors")


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sealed_tensors.write(path, TENSORS, plain, VERSION)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return sealed_tensors.read(path, TENSORS)
    except LoadError as error:
        raise LoadError(f"{path} is damaged: {error.what}", where=str(path), advice=error.advice) from error


def _inputs(program: Program, tensors: Mapping[str, torch.Tensor], path: Path) -> tuple[Any, ...]:
    """The flat example inputs; those that are not tensors are in the signature."""
    leaves = []
    for index, item in enumerate(program.signature.inputs):
        if not item.is_constant and str(index) not in tensors:
            raise LoadError(f"{path} has no input {index} ({item.name})", advice="write it again, or remove it")
        leaves.append(item.constant if item.is_constant else tensors[str(index)])
    return tuple(leaves)
