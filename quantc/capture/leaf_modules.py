"""Leaf modules, which are not traced into: their selection, and their outputs on the example inputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from quantc.capture.model_copies import Tensors, cloned_inputs, twin
from quantc.errors import CaptureError, suggest


class LeafSelector:
    """Selection of leaf modules by qualified name or class."""

    def __init__(self, names: frozenset[str], classes: tuple[type[nn.Module], ...]) -> None:
        self.names = names
        self.classes = classes

    def selects(self, module: nn.Module, name: str) -> bool:
        return name in self.names or (bool(self.classes) and isinstance(module, self.classes))

    def __bool__(self) -> bool:
        return bool(self.names or self.classes)


def leaf_selector(model: nn.Module, leaf: str | type[nn.Module] | Iterable[str | type[nn.Module]]) -> LeafSelector:
    """Selector whose items all match a module of the model: a misspelt one must not be ignored."""
    wanted = (leaf,) if isinstance(leaf, str | type) else tuple(leaf)
    names = frozenset(item for item in wanted if isinstance(item, str))
    classes = tuple(item for item in wanted if isinstance(item, type))
    for item in wanted:
        if not isinstance(item, str | type):
            raise CaptureError(
                f"leaf holds a {type(item).__name__}",
                where=f"leaf={wanted!r}"[:200],
                advice="give the names of modules, as in model.named_modules(), or their classes",
            )
    known = {name: module for name, module in model.named_modules() if name}
    for name in sorted(names):
        if name not in known:
            raise CaptureError(
                f"leaf {name!r} names no module of {type(model).__name__}",
                where=f"leaf={name!r}",
                advice=suggest(name, known, noun="modules"),
            )
    for kind in classes:
        if not any(isinstance(module, kind) for module in known.values()):
            present = {type(module).__name__ for module in known.values()}
            raise CaptureError(
                f"leaf {kind.__name__}: {type(model).__name__} has no module of that class",
                where=f"leaf={kind.__name__}",
                advice=suggest(kind.__name__, present, noun="classes"),
            )
    # a scripted module has no Python code to follow, so it is whole by nature
    scripted = {name for name, module in known.items() if isinstance(module, torch.jit.ScriptModule)}
    return LeafSelector(names | scripted, classes)


def leaf_outputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: LeafSelector
) -> dict[str, list[Any]]:
    """Outputs of each leaf on the example inputs, so that shapes are known after code that cannot be traced."""
    runnable = twin(model, Tensors.COPIED)
    found: dict[str, list[Any]] = {}
    names = {module: name for name, module in runnable.named_modules() if name and leaves.selects(module, name)}

    def note(module: nn.Module, _: Any, output: Any) -> None:
        if module in names:
            found.setdefault(names[module], []).append(output)

    # a hook on all modules, because scripted ones take none of their own
    handle = register_module_forward_hook(note)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            given, named = cloned_inputs((args, kwargs))
            runnable(*given, **named)
    finally:
        handle.remove()
    return found
