"""Inputs A and B of `quantc compare`: programs, lowered modules, and files of other runtimes.

Programs are compared op by op; the others only by outputs, since kernels and runtimes have other ops inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantc.cli.model_source import KINDS, Examples, load_all
from quantc.errors import InputError, LoadError, QuantcError
from quantc.ir.program import Program
from quantc.targets.kernels.lowered import Lowered
from quantc.targets.onnx.seal import check_seal
from quantc.targets.onnx.sessions import OnnxRuntime
from quantc.verbs.capture import Method
from quantc.verbs.load import load as load_stored

Run = Callable[[Sequence[Any]], list[Any]]
"""From the flat inputs of a program to its flat outputs."""


@dataclass(frozen=True)
class Side:
    """A or B."""

    source: str
    told: str
    """A short description."""
    run: Run
    program: Program | None
    """The program that says what it takes and yields; None for files that do not record how their inputs are arranged."""
    is_open: bool = False
    """True if it runs `program` itself, op by op."""
    model: nn.Module | None = None
    """The captured model, if a factory gave one."""
    batches: Any = None
    """Data that came with it."""

    @property
    def name(self) -> str:
        return self.program.name if self.program is not None else self.source

    def to_data(self) -> dict[str, Any]:
        stage = None if self.program is None else self.program.stage.label
        return {"source": self.source, "name": self.name, "stage": stage, "what": self.told}


def read_side(source: str, method: Method, examples: Examples | None = None) -> Side:
    """Side of a SOURCE argument; `examples` are for models without example inputs."""
    path = Path(source)
    readers = {".pte": _pte, ".onnx": _onnx, ".qc": _read_program}
    if path.suffix in readers:
        if not path.is_file():
            raise LoadError(f"no such file: {source}", where=source, advice=f"{KINDS}; or a .onnx or .pte file")
        return readers[path.suffix](path)
    loaded = load_all(source, method, examples)
    return _of_program(source, loaded.program, loaded.model, loaded.batches)


def _of_program(source: str, program: Program, model: nn.Module | None = None, batches: Any = None) -> Side:
    quantizer = "" if program.plan.quantizer is None else f" for {program.plan.quantizer.name}"
    told = f"{program.name}, {program.stage.label}{quantizer}"
    return Side(source, told, program.run_flat, program, is_open=True, model=model, batches=batches)


def _read_program(path: Path) -> Side:
    found = load_stored(path)
    if isinstance(found, Program):
        return _of_program(str(path), found)
    lowered: Lowered = found

    def run(leaves: Sequence[Any]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(list(leaves), lowered.program.signature.in_spec)
        return pytree.tree_leaves(lowered(*args, **kwargs))

    return Side(str(path), f"{lowered.program.name}, lowered for {lowered.target}", run, lowered.program)


def _pte(path: Path) -> Side:
    from quantc.targets.executorch.reading import load

    pte = load(path)

    def run(leaves: Sequence[Any]) -> list[Any]:
        return list(pte.run(*(leaf for leaf in leaves if isinstance(leaf, Tensor))))

    return Side(str(path), pte.headline, run, None)


def _onnx(path: Path) -> Side:
    where = str(path)
    check_seal(path)
    try:
        session = OnnxRuntime(where, torch.get_num_threads())
    except QuantcError:
        raise
    except Exception as error:  # its errors have no class in common
        raise LoadError(
            f"ONNX Runtime cannot read it: {_first(error)}", where=where, advice="write it again, and copy it whole"
        ) from error

    def run(leaves: Sequence[Any]) -> list[Any]:
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if len(tensors) != len(session.names):
            raise InputError(
                f"the model takes {len(session.names)} tensors, and the program {len(tensors)}",
                where=f"{where}: {', '.join(session.names)}",
                advice="compare it with the program it was written from",
            )
        try:
            return list(session(tensors))
        except Exception as error:
            raise InputError(
                f"ONNX Runtime does not run it on this batch: {_first(error)}",
                where=where,
                advice="compare it with the program it was written from, on batches that it takes",
            ) from error

    return Side(where, f"{path.stem}, in ONNX Runtime", run, None)


def _first(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
