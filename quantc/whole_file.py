"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantc.errors import SaveError


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft beside `path` to write to. It takes the place of `path` when the block ends well, at once and on disk;
    otherwise the file that was there before stays as it was. SaveError if it cannot be written."""
    if path.exists() and not path.is_file():  # a device or a folder: to put a file in its place would be to remove it
        raise _unwritten(path, "it is there, and is no file")
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        with open(draft, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise _unwritten(path, error.strerror or str(error)) from error
    finally:
        draft.unlink(missing_ok=True)


def _unwritten(path: Path, why: str) -> SaveError:
    return SaveError(
        f"{path} cannot be written: {why}",
        where=str(path),
        advice="give a path in a folder that exists and can be written to",
    )
