"""The targets that other runtimes serve: by name, what lowers a program for each. It is imported when it is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from quantc.errors import UnknownNameError, suggest

TARGETS: dict[str, str] = {
    "executorch": "quantc.executorch.lowering:lower",
}
"""By the name of the target: "module:function", called as `function(program, target, **options)`."""

SUFFIXES: dict[str, str] = {
    ".pte": "executorch",
}
"""By the ending of a file's name: the target whose file it is."""


def lower_for(program: Any, target: str, **options: Any) -> Any:
    """What the target's own function makes of a program."""
    module, _, name = TARGETS[target].partition(":")
    function = getattr(import_module(module), name)
    check_options(target, options, [*inspect.signature(function).parameters][2:])
    return function(program, target, **options)


def check_options(target: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that a target does not have."""
    for name in given:
        if name not in known:
            raise UnknownNameError(
                f"{target} has no option {name!r}",
                where=f"qc.lower(program, {target!r})",
                advice=suggest(name, known, noun="options"),
            )
