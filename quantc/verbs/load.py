"""`qc.load`: reads a program or a lowered module from a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, overload

from quantc.errors import LoadError
from quantc.files.regular_file import as_path
from quantc.ir.program import Program
from quantc.targets.kernels.lowered import load_lowered


@overload
def load(path: str | os.PathLike[str], *, portable: Literal[True]) -> Program: ...
@overload
def load(path: str | os.PathLike[str], *, portable: bool = False) -> Any: ...
def load(path: str | os.PathLike[str], *, portable: bool = False) -> Any:
    """Read a file written by `save`: a `Program`, or a `Lowered` on the kernels selected when it was lowered.

    A `.pte` file becomes a `quantc.targets.executorch.Pte`, to be run on ExecuTorch's runtime. `portable=True` returns
    the program of a lowered module instead. LoadError, naming the field, on anything that `save` did not write. Nothing
    is unpickled, and nothing in the file is executed.
    """
    place = as_path(path, LoadError)
    if place.suffix.lower() == ".onnx":
        raise LoadError(
            "an ONNX file holds no program of quantc's",
            where=str(place),
            advice=f"run it with onnxruntime.InferenceSession({str(place)!r}); keep the program too, program.save(path), to lower it again",
        )
    if place.suffix == ".pte" or _begins_as_pte(place):
        from quantc.targets.executorch.reading import load as load_pte

        if portable:
            raise LoadError(
                "a .pte file holds no program of quantc's",
                where=str(place),
                advice="run it: qc.load(path); keep the program too, program.save(path), to lower it again",
            )
        return load_pte(path)
    return load_lowered(path, portable=portable)


def _begins_as_pte(path: Path) -> bool:
    """True if a file starts like an ExecuTorch file, whatever its name."""
    from quantc.targets.executorch.pte_container import MAGIC

    if not path.is_file():
        return False  # reading it will say why
    try:
        with path.open("rb") as file:
            return file.read(8)[4:] == MAGIC
    except OSError:
        return False
