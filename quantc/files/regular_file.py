"""Reading regular files only: a pipe would block the reader, and a device may never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from quantc.errors import LoadError, QuantcError

MAX_TEXT = 1 << 30
"""The largest text that is read, in bytes."""


def as_path(given: Any, error: type[QuantcError]) -> Path:
    """The argument as a Path; raise `error` if it is none."""
    try:
        return Path(given)
    except TypeError as fault:
        raise error(
            f"a {type(given).__name__} is no path",
            where=f"path={given!r:.60}",
            advice='give the path of a file, as text or as pathlib.Path: "model.qc"',
        ) from fault


def check_regular(path: str | os.PathLike[str], advice: str, error: type[QuantcError] = LoadError) -> Path:
    """The path, if it is a regular file; raise `error` if it is missing, a folder, a pipe or a device."""
    place = Path(path)
    try:
        mode = place.stat().st_mode
    except (OSError, ValueError) as fault:
        why = (fault.strerror if isinstance(fault, OSError) else None) or str(fault)
        told = "" if isinstance(fault, FileNotFoundError) else f": {why}"
        raise error(f"no such file: {place}{told}", where=str(place), advice=advice) from fault
    if not stat.S_ISREG(mode):
        raise error(f"no such file: {place}: it is {_kind(mode)}", where=str(place), advice=advice)
    return place


def read_text(
    path: str | os.PathLike[str], advice: str, error: type[QuantcError] = LoadError, *, most: int = MAX_TEXT
) -> str:
    """The text of a file; raise `error` if it is unreadable, not text, or larger than `most` bytes."""
    content = read_bytes(path, advice, error, most=most)
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as fault:
        raise error(f"{path} cannot be read: it is no text in UTF-8", where=str(path), advice=advice) from fault


def read_bytes(
    path: str | os.PathLike[str], advice: str, error: type[QuantcError] = LoadError, *, most: int | None = None
) -> bytes:
    """The bytes of a file; raise `error` if it is unreadable or larger than `most` bytes."""
    place = check_regular(path, advice, error)
    try:
        with place.open("rb") as file:
            content = file.read() if most is None else file.read(most + 1)
    except OSError as fault:
        why = fault.strerror or str(fault)
        raise error(f"{place} cannot be read: {why}", where=str(place), advice=advice) from fault
    if most is not None and len(content) > most:
        raise error(f"{place} cannot be read: it is larger than {most:,} bytes", where=str(place), advice=advice)
    return content


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
