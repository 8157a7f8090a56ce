"""`qc.load`: what a file holds, a program or a lowered module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, overload

from quantc.errors import LoadError, UnknownNameError
from quantc.kernels.lowered import raised
from quantc.kernels.table import kernels_for
from quantc.program import Program
from quantc.store.programs import read


@overload
def load(path: str | os.PathLike[str], *, portable: Literal[True]) -> Program: ...
@overload
def load(path: str | os.PathLike[str], *, portable: bool = False) -> Any: ...
def load(path: str | os.PathLike[str], *, portable: bool = False) -> Any:
    """What `save` wrote: a `Program`, or a `Lowered` on the kernels that were chosen when it was lowered.

    A `.pte` file comes as `quantc.executorch.Pte`, to be run on ExecuTorch's runtime. `portable=True` gives the program of a lowered module instead. LoadError, naming the field, on anything that
    `save` did not write. Nothing is unpickled, and nothing in the file is executed.
    """
    if Path(path).suffix == ".pte" and not portable:
        from quantc.executorch.reading import load as load_pte

        return load_pte(path)
    program, lowering = read(path)
    if lowering is None or portable:
        return program
    try:
        kernels_for(lowering.target)
    except UnknownNameError as error:
        raise LoadError(
            f"{os.fspath(path)}: {error.what}",
            where="lowered.target",
            advice=f"{error.advice}; or read the program alone, qc.load(path, portable=True)",
        ) from error
    return raised(program, lowering)
