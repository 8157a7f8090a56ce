"""Size of a program's parameters and buffers: in memory, and in a file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from quantc.errors import SaveError
from quantc.files import sealed_tensors
from quantc.ir.program import Program
from quantc.store.file_versions import PROGRAM, VERSION
from quantc.store.programs import CONSTANTS, contents


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of parameters and buffers, before and after."""

    before: int
    after: int
    """In memory. Integers of 4 or 2 bits take a byte each there."""
    stored: int | None = None
    """Bytes of `after` as `program.save` stores them: packed, constant tensors once. None if it was not requested, or the program
    cannot be saved."""
    file: int | None = None
    """The whole file: the program's text, its plan and example inputs as well."""

    @property
    def ratio(self) -> float:
        """Remaining fraction in memory; 1 if there was nothing."""
        return self.after / self.before if self.before else 1.0

    @property
    def stored_ratio(self) -> float | None:
        """Remaining fraction in a file; 1 if there was nothing."""
        if self.stored is None:
            return None
        return self.stored / self.before if self.before else 1.0

    def __str__(self) -> str:
        text = f"{self.before:,} bytes before, {self.after:,} after ({self.ratio:.3f} of it)"
        if self.stored is None:
            return text
        return f"{text}, {self.stored:,} stored ({self.stored_ratio:.3f}) in a file of {self.file:,}"

    def to_data(self) -> dict[str, Any]:
        return {
            "before": self.before,
            "after": self.after,
            "ratio": self.ratio,
            "stored": self.stored,
            "stored_ratio": self.stored_ratio,
            "file": self.file,
        }


def size_of(model: Program | nn.Module) -> int:
    """Bytes of parameters and buffers in memory; tied tensors count once."""
    root = model.root if isinstance(model, Program) else model
    tensors: list[Tensor] = [*root.parameters(), *root.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def size(before: Program | nn.Module, after: Program | nn.Module) -> Size:
    """Sizes of two models or programs in memory."""
    return Size(size_of(before), size_of(after))


def size_and_file(before: Program | nn.Module, after: Program) -> Size:
    """Like `size`, with the file size of the second; no file is written."""
    found, on_disk = size(before, after), file_size(after)
    return found if on_disk is None else replace(found, stored=on_disk.constants, file=on_disk.whole)


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
