"""Reading `.pte` files."""

from __future__ import annotations

import os

from quantc.errors import LoadError
from quantc.files.regular_file import as_path, read_bytes
from quantc.targets.executorch.artifact import Pte, read_back
from quantc.targets.executorch.pte_container import ADVICE, unseal_pte
from quantc.targets.executorch.runtime import Running


def load(path: str | os.PathLike[str]) -> Pte:
    """Load a `.pte` file to run it; LoadError if it is invalid, damaged or truncated. Files of other writers are accepted."""
    place = as_path(path, LoadError)
    data = read_bytes(place, ADVICE)
    content = unseal_pte(data, str(place))
    running = Running(content, str(place))
    metadata = running.metadata()
    if metadata is not None and len(content) == len(data):
        raise LoadError("the file has lost its seal: it was cut short", where=str(place), advice=ADVICE)
    return read_back(content, metadata, str(place))
