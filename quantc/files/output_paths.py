"""The outputs of a command, checked before any work: none may replace a file that quantc did not write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from quantc.errors import SaveError
from quantc.files.atomic_file import check_writable
from quantc.files.sealed_tensors import label_of

HEAD = 4096
"""Bytes at the start of a file by which its kind is recognized."""
GENERATOR = '<meta name="generator" content="quantc">'
"""Marks an HTML page as written by quantc."""


class Output(NamedTuple):
    """A file to be written."""

    what: str
    """Noun for messages: "program"."""
    path: Path
    kind: str | Callable[[Path], bool]
    """One of `KINDS`, or the test of an existing file itself."""


def _begins(*marks: bytes) -> Callable[[Path], bool]:
    """Test of a file for these marks in its first bytes, the first mark at offset 0."""

    def is_own(path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(HEAD)
        return head.startswith(marks[0]) and all(mark in head for mark in marks)

    return is_own


def _sealed(label: str) -> Callable[[Path], bool]:
    return lambda path: label_of(path) == label


def _is_pte(path: Path) -> bool:
    mark = b"quantc-1"
    with path.open("rb") as file:
        file.seek(-min(len(mark), path.stat().st_size), 2)
        return file.read() == mark


KINDS: dict[str, Callable[[Path], bool]] = {
    "program": _sealed("quantc.program"),
    "tensors": _sealed("quantc.tensors"),
    "onnx": _begins(b"\x08", b"\x12\x06quantc"),  # the version, and the producer
    "executorch": _is_pte,
    "page": _begins(b"<!doctype html>", GENERATOR.encode()),
    "text": _begins(b'program "'),
    "table": _begins(b"node "),
    "json": _begins(b'{\n "format": 1,\n "name": '),
    "dot": _begins(b'digraph "', b'node [shape=box, fontname="monospace"];'),
    "graphml": _begins(b"<graphml", b'attr.name="operand"'),
}
"""By kind: test whether an existing file was written by quantc as that kind, and may be replaced."""


def check_outputs(outputs: Iterable[Output], where: str) -> None:
    """Raise an error for an output that cannot be written, or that would replace a file which quantc did not write as
    that kind. Empty files may be replaced."""
    for output in outputs:
        if output.path.exists() and not _is_own(output):
            raise SaveError(
                f"{output.path} is there, and is no {output.what} that quantc wrote: it would be replaced",
                where=where,
                advice="give another name, or move that file away first",
            )
        check_writable(output.path, makes_folders=True)


def _is_own(output: Output) -> bool:
    if not output.path.is_file():
        return False
    try:
        return not output.path.stat().st_size or (KINDS[output.kind] if isinstance(output.kind, str) else output.kind)(
            output.path
        )
    except OSError:
        return False
