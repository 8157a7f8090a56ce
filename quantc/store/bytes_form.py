"""File contents as bytes: modules are pickled as the file that `save` writes, so that they never contain code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypeVar

from quantc.files.atomic_file import write_bytes

if TYPE_CHECKING:
    from quantc.ir.program import Program

T = TypeVar("T")


def as_bytes(save: Callable[[Path], None]) -> bytes:
    """Bytes that `save` writes to a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        save(path)
        return path.read_bytes()


def from_bytes(content: bytes, load: Callable[[Path], T]) -> T:
    """Result of `load` on a file with this content."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        write_bytes(path, content)
        return load(path)


def program_of(content: bytes) -> Program:
    """The program that was pickled as this content."""
    from quantc.store.programs import load

    return from_bytes(content, load)
