"""A program's text in a file, with its tensors beside it.

    program.txt                  the text
    program.safetensors          its constants; without them the program reads back on the meta device
    program.inputs.safetensors   its example inputs, so that it can be run and its numbers guarded

Reading these executes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from quantc.digests import constants
from quantc.errors import LoadError
from quantc.parse import parse
from quantc.program import Program


@dataclass(frozen=True)
class Snapshot:
    """A program as it is now: its text and the tensors it refers to, which are not copied."""

    text: str
    constants: Mapping[str, torch.Tensor]
    inputs: tuple[Any, ...] | None

    @staticmethod
    def of(program: Program) -> Snapshot:
        return Snapshot(program.dump("text"), constants(program), program.example_inputs)

    def write(self, path: Path) -> None:
        """Write the text to `path` and the tensors beside it."""
        path.write_text(self.text, encoding="utf-8")
        _write_tensors(_constants_file(path), self.constants)
        leaves = {str(i): leaf for i, leaf in enumerate(self.inputs or ()) if isinstance(leaf, torch.Tensor)}
        if self.inputs is not None:
            _write_tensors(_inputs_file(path), leaves)


def read_text(path: Path) -> Program:
    """The program of a text file, with the constants and example inputs that lie beside it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}", advice="give a file that program.dump() wrote") from error
    tensors = _read_tensors(_constants_file(path)) if _constants_file(path).exists() else None
    program = parse(text, tensors)
    if _inputs_file(path).exists():
        program.example_inputs = _inputs(program, _read_tensors(_inputs_file(path)), _inputs_file(path))
    return program


def _constants_file(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def _inputs_file(path: Path) -> Path:
    return path.with_suffix(".inputs.safetensors")


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # copies: the format refuses tensors that share memory, as tied weights do
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} is damaged: {error}", advice="write it again, or remove it") from error


def _inputs(program: Program, tensors: Mapping[str, torch.Tensor], path: Path) -> tuple[Any, ...]:
    """The flat example inputs; those that are not tensors are in the signature."""
    leaves = []
    for index, item in enumerate(program.signature.inputs):
        if not item.is_constant and str(index) not in tensors:
            raise LoadError(f"{path} has no input {index} ({item.name})", advice="write it again, or remove it")
        leaves.append(item.constant if item.is_constant else tensors[str(index)])
    return tuple(leaves)
