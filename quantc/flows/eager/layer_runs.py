"""The runs of a prepared model: how often each layer runs in one call, and which layer reads another's output.
Module names alone tell neither, and both decide whether layers can be quantized as they are."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LEDGER = "_quantc_ledger"


@dataclass(eq=False)
class Ledger:
    """The runs of one prepared model."""

    runs: int = 0
    most_calls: Counter[str] = field(default_factory=Counter[str])
    """By path: the largest number of calls in one run of the model."""
    read_by: dict[str, str] = field(default_factory=dict)
    """By path: the layer that reads just what this one yields."""
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    """The arguments of the last call, to try the converted model on."""
    calls: Counter[str] = field(default_factory=Counter[str])
    yielded: dict[int, tuple[weakref.ref[Tensor], str]] = field(default_factory=dict)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.runs += 1
        self.calls.clear()
        self.yielded.clear()
        self.inputs = (args, kwargs)

    def enter(self, path: str, args: tuple[Any, ...]) -> None:
        self.calls[path] += 1
        self.most_calls[path] = max(self.most_calls[path], self.calls[path])
        known = self.yielded.get(id(args[0])) if args else None
        if known is not None and known[0]() is args[0]:
            self.read_by[known[1]] = path

    def leave(self, path: str, output: Any) -> None:
        if isinstance(output, Tensor):
            self.yielded[id(output)] = (weakref.ref(output), path)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files take what was found, and none of the tensors."""
        return {**vars(self), "yielded": {}, "inputs": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        twin = Ledger(self.runs, Counter(self.most_calls), dict(self.read_by), self.inputs)
        memo[id(self)] = twin
        return twin


@dataclass(eq=False)
class Begins:
    """The hook of the model itself."""

    ledger: Ledger

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            self.ledger.begin(args, kwargs)


@dataclass(eq=False)
class Enters:
    """The hook before a layer."""

    ledger: Ledger
    path: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.ledger.enter(self.path, args)


@dataclass(eq=False)
class Leaves:
    """The hook behind a layer."""

    ledger: Ledger
    path: str

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.ledger.leave(self.path, output)


HOOKS = (Begins, Enters, Leaves)


def watch(model: nn.Module, layers: Mapping[str, nn.Module]) -> Ledger:
    """Keep a ledger of a model from now on."""
    ledger = Ledger()
    for path, layer in layers.items():
        layer.register_forward_pre_hook(Enters(ledger, path))
        layer.register_forward_hook(Leaves(ledger, path))
    model.register_forward_pre_hook(Begins(ledger), prepend=True, with_kwargs=True)
    vars(model)[LEDGER] = ledger
    return ledger


def ledger_of(model: nn.Module) -> Ledger | None:
    """The ledger of a prepared model; None if it was not prepared here."""
    found = vars(model).get(LEDGER)
    return found if isinstance(found, Ledger) else None


def unwatch(model: nn.Module) -> None:
    """Take the hooks off again."""
    vars(model).pop(LEDGER, None)
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, HOOKS)]:
                hooks.pop(key)
                module._forward_pre_hooks_with_kwargs.pop(key, None)
