"""What the command line calls a SOURCE: where a program comes from.

- a `.pt2` file, as `torch.export.save` writes it;
- a `.txt` file with a program's text (and its tensors beside it, see `quantc.text_files`);
- `package.module:name`: a model, or a function that gives one. The model comes with example inputs: the function
  gives `(model, example_inputs)`, or the model has them as its attribute `example_inputs`;
- nothing: the example that is built in.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from quantc.api import Method, capture
from quantc.errors import LoadError, suggest
from quantc.program import Program
from quantc.text_files import read_text

EXAMPLE = "quantc.example:digits_cnn"
KINDS = "give a .pt2 file, a .txt file with a program's text, or package.module:name"


def load(source: str | None, method: Method = "auto") -> Program:
    """The program of a SOURCE, captured if need be."""
    if source is None:
        return _captured(EXAMPLE, method)
    path = Path(source)
    if path.suffix in (".pt2", ".txt"):
        if not path.is_file():
            raise LoadError(f"there is no file {source}", advice=KINDS)
        return capture(path) if path.suffix == ".pt2" else read_text(path)
    if ":" not in source:
        raise LoadError(f"{source!r} is not a source of programs", advice=KINDS)
    return _captured(source, method)


def imported(place: str) -> Any:
    """What `package.module:name` names. Modules in the current folder are found as well."""
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


def _captured(place: str, method: Method) -> Program:
    value = imported(place)
    if callable(value) and not isinstance(value, nn.Module):
        value = _called(place, value)
    if isinstance(value, Program):
        return value
    if isinstance(value, ExportedProgram):
        return capture(value)
    model, inputs = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(model, nn.Module):
        raise LoadError(
            f"{place} gives a {type(value).__name__}, not a model",
            where=place,
            advice="let the function return (model, example_inputs)",
        )
    if inputs is None:
        inputs = getattr(model, "example_inputs", None)
    return capture(model, inputs, method=method)


def _called(place: str, factory: Any) -> Any:
    try:
        return factory()
    except Exception as error:
        raise LoadError(
            f"{place}() raised {type(error).__name__}: {error}",
            where=place,
            advice="it must be callable without arguments and return (model, example_inputs)",
        ) from error
