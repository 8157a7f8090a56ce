"""Reading `.pte` files."""

from __future__ import annotations

import os
from pathlib import Path

from quantc.errors import LoadError
from quantc.executorch.artifact import Pte, read_back
from quantc.executorch.container import ADVICE, unsealed
from quantc.executorch.running import Running


def load(path: str | os.PathLike[str]) -> Pte:
    """A `.pte` file, to be run; LoadError if it is none, damaged, or cut short. Files that others wrote will do."""
    place = Path(path)
    try:
        data = place.read_bytes()
    except OSError as error:
        raise LoadError(f"{place} cannot be read: {error.strerror}", where=str(place), advice=ADVICE) from error
    content = unsealed(data, str(place))
    running = Running(content, str(place))
    return read_back(content, running.metadata(), str(place))
