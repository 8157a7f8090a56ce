"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A draft beside `path` to write to. It takes the place of `path` when the block ends well, at once and on disk;
    otherwise the file that was there before stays as it was."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        with open(draft, "r+b") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
