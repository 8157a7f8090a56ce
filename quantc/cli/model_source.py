"""The SOURCE argument: the origin of a program.

- a `.qc` file, as `program.save` writes it;
- a `.pt2` file, as `torch.export.save` writes it;
- a `.txt` file with a program's text (and its tensors beside it, see `quantc.text.files`);
- `package.module:name`: a model, or a function that returns one. The model has example inputs: the function returns
  `(model, example_inputs)`, or the model has an attribute `example_inputs`, or they are the first of the batches in
  --data. A dict holds keyword arguments. `(model, example_inputs, batches)` also gives the calibration batches;
- nothing: the built-in example.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.export import ExportedProgram

from quantc.errors import LoadError, suggest
from quantc.ir.program import Program
from quantc.store import load as load_saved
from quantc.text.files import read_text
from quantc.verbs.capture import Method, capture

EXAMPLE = "quantc.cli.example:digits_cnn"
KINDS = "give a .qc file, a .pt2 file, a .txt file with a program's text, or package.module:name"


READERS: dict[str, Callable[[Path], Program]] = {".qc": load_saved, ".pt2": capture, ".txt": read_text}
"""Readers by file suffix."""


OTHERS = {".pte": "ExecuTorch", ".onnx": "ONNX runtimes"}
"""Files that are written and not read as programs."""


class Loaded(NamedTuple):
    """A program, its calibration batches if it has any, and the module it was captured from if any."""

    program: Program
    batches: Any = None
    model: nn.Module | None = None


def load(source: str | None, method: Method = "auto") -> Program:
    """Program of a SOURCE, captured if necessary."""
    return load_all(source, method).program


Examples = Callable[[nn.Module], "tuple[Any, ...] | dict[str, Any] | None"]
"""Makes the example inputs of a model that has none: positional ones, or keyword arguments."""


def load_all(
    source: str | None, method: Method = "auto", examples: Examples | None = None, dtype: str | None = None
) -> Loaded:
    """Program of a SOURCE, captured if necessary, and its batches. `examples` provides example inputs for models
    without any; `dtype` is the dtype to cast a model to.
    """
    if source is None:
        return _capture(EXAMPLE, method, examples, dtype)
    path = Path(source)
    if path.suffix in READERS:
        if not path.is_file():
            raise LoadError(f"no such file: {source}", where=f"the source {source}", advice=KINDS)
        _check_no_cast(source, dtype)
        return Loaded(READERS[path.suffix](path))
    if (runtime := OTHERS.get(path.suffix)) is not None:
        raise LoadError(
            f"{source} is a file for {runtime}, and no program can be read from it",
            where=f"the source {source}",
            advice=f"give the program it was written from, {path.with_suffix('.qc')} beside it; "
            f"quantc compare A {source} runs the file itself"
            + (", and quantc.targets.executorch.load(path) in Python" if path.suffix == ".pte" else ""),
        )
    if ":" not in source:
        raise LoadError(f"{source!r} is not a source of programs", where=f"the source {source}", advice=KINDS)
    return _capture(source, method, examples, dtype)


def _check_no_cast(source: str, dtype: str | None) -> None:
    if dtype is not None:
        raise LoadError(
            f"{source} holds a program, and only models are cast",
            where=f"--dtype {dtype}",
            advice="leave --dtype out, or give the model: package.module:name",
        )


def import_object(place: str) -> Any:
    """Object named by `package.module:name`. Modules in the current folder are found as well."""
    module_name, _, name = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise LoadError(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}",
            where=place,
            advice="run it from the folder that holds the module, or install the package",
        ) from error
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            known = [item for item in dir(value) if not item.startswith("_")]
            raise LoadError(f"{module_name} has no {name!r}", where=place, advice=suggest(part, known))
        value = getattr(value, part)
    return value


def call_factory(place: str, factory: Any, gives: str = "(model, example_inputs)") -> Any:
    """Result of a function without parameters; LoadError if it raises."""
    try:
        return factory()
    except Exception as error:
        raise LoadError(
            f"{place}() raised {type(error).__name__}: {error}",
            where=place,
            advice=f"it must be callable without arguments and return {gives}",
        ) from error


def _capture(place: str, method: Method, examples: Examples | None, dtype: str | None) -> Loaded:
    value = import_object(place)
    if callable(value) and not isinstance(value, nn.Module):
        value = call_factory(place, value)
    if isinstance(value, Program | ExportedProgram):
        _check_no_cast(place, dtype)
    if isinstance(value, Program):
        return Loaded(value)
    if isinstance(value, ExportedProgram):
        return Loaded(capture(value))
    parts: tuple[Any, ...] = value if isinstance(value, tuple) and len(value) in (2, 3) else (value,)
    model, inputs, batches = (*parts, None, None)[:3]
    if not isinstance(model, nn.Module):
        raise LoadError(
            f"{place} gives a {type(value).__name__}, not a model",
            where=place,
            advice="let the function return (model, example_inputs)",
        )
    if inputs is None:
        inputs = getattr(model, "example_inputs", None)
    if inputs is None and examples is not None:
        inputs = examples(model)
    named: dict[str, Any] | None = None
    if isinstance(inputs, Mapping):
        named = dict(inputs)
        inputs = None
    program = capture(model, inputs, method=method, example_kwargs=named, dtype=dtype)
    return Loaded(program, batches, model)
