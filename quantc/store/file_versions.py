"""Program files and their versions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from quantc.files import sealed_tensors
from quantc.files.sealed_tensors import FIELD, FileKind, digest

VERSION = 2
LOWERED = 3
READ = (1, VERSION, LOWERED)
"""The versions that are read. Since 2, contents are stored once and numbers of any kind are stored narrow or packed.
3 is that of lowered modules: a quantc that does not know them must not take one for a program."""
ADVICE = "give a file that program.save wrote, or write it again"
PROGRAM = FileKind("quantc.program", READ, "program", ADVICE)


def write(
    path: Path, tensors: Mapping[str, Tensor], known: Mapping[str, str] | None = None, version: int = VERSION
) -> None:
    """Write contiguous tensors to a file, atomically. `known` are precomputed digests."""
    sealed_tensors.write(path, PROGRAM, tensors, version, known)


def read(path: Path) -> dict[str, Tensor]:
    """Tensors of a file, in memory of their own, each checked. LoadError, naming the field, on any damage."""
    return sealed_tensors.read(path, PROGRAM)


__all__ = ["ADVICE", "FIELD", "LOWERED", "PROGRAM", "READ", "VERSION", "digest", "read", "write"]
