"""Reading `.pte` files."""

from __future__ import annotations

import os
from pathlib import Path

from quantc.executorch.artifact import Pte, read_back
from quantc.executorch.container import ADVICE, unsealed
from quantc.executorch.running import Running
from quantc.files.regular_file import read_bytes


def load(path: str | os.PathLike[str]) -> Pte:
    """A `.pte` file, to be run; LoadError if it is none, damaged, or cut short. Files that others wrote will do."""
    place = Path(path)
    content = unsealed(read_bytes(place, ADVICE), str(place))
    running = Running(content, str(place))
    return read_back(content, running.metadata(), str(place))
