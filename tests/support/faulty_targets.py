"""Targets from outside, and what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantc.ir.program import Program
from quantc.targets.target import TARGETS, Target, register_target


class Names:
    """A program as a list of the names of its ops."""

    def __init__(self, program: Program) -> None:
        self.ops = [node.name for node in program.nodes() if node.op == "call_function"]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.ops), encoding="utf-8")

    def to_data(self) -> dict[str, Any]:
        return {"ops": len(self.ops)}


class Unsaved(Names):
    """Raises when it is saved."""

    def save(self, path: Path) -> None:
        raise KeyError("no slot is free")


class Unwritten(Names):
    """Writes nothing."""

    def save(self, path: Path) -> None:
        """Forget about it."""


class Untold(Names):
    """Summarizes itself as something that is no JSON."""

    def to_data(self) -> dict[str, Any]:
        return {"ops": {1, 2}}


class Listed(Names):
    """Summarizes itself as a list."""

    def to_data(self) -> Any:
        return [1]


class Uncallable(Names):
    """Raises when it is called."""

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("the device is off")


def erase_all(program: Program) -> Names:
    """Write over the program that is lowered."""
    for tensor in program.root.state_dict().values():
        tensor.zero_()
    program.name = "overwritten"
    made = Names(program)
    (output,) = program.graph.find_nodes(op="output")
    output.args = ((),)
    for node in reversed(list(program.graph.nodes)):
        if node.op == "call_function":
            program.erase(node)
    return made


@contextmanager
def registered(target: Target) -> Iterator[Target]:
    """A target for as long as it is used."""
    register_target(target)
    try:
        yield target
    finally:
        TARGETS.forget(target.name)
