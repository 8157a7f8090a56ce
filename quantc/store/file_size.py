"""File size of a program, without writing it."""

from __future__ import annotations

from dataclasses import dataclass

from quantc.errors import SaveError
from quantc.files import sealed_tensors
from quantc.ir.program import Program
from quantc.store.file_versions import PROGRAM, VERSION
from quantc.store.programs import CONSTANTS, contents


@dataclass(frozen=True, slots=True)
class FileSize:
    """Bytes of the constants and of the whole file."""

    constants: int
    """Of the parameters and buffers, in the form they are stored in."""
    whole: int
    """Of the file: text, plan and example inputs as well."""


def file_size(program: Program) -> FileSize | None:
    """Size of the file that `program.save` would write; None if the program cannot be saved."""
    try:
        tensors, digests = contents(program)
    except SaveError:
        return None
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(CONSTANTS))
    return FileSize(stored, sealed_tensors.file_size(PROGRAM, tensors, VERSION, digests))
