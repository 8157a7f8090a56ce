"""Find the layers of a model that can be fused, by running a copy of it."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from quantc.flows.eager import checks
from quantc.flows.eager.adopt_modules import adopt


class _Reading(TorchFunctionMode):
    """Notes who reads what layers yield: another layer, or a function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.running: list[str] = []
        self.calls: Counter[str] = Counter()
        self.made_by: dict[int, str] = {}
        self.read_by: dict[str, set[str]] = {}
        self.kept: list[Tensor] = []
        """Tensors are known by their address, so none of them may go."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":  # a look at the shape is no reading
            for leaf in pytree.tree_leaves((args, kwargs)):
                self.reads(leaf, self.running[-1] if self.running else f"function {len(self.kept)} {func}")
        return func(*args, **(kwargs or {}))

    def reads(self, value: Any, reader: str) -> None:
        maker = self.made_by.get(id(value)) if isinstance(value, Tensor) else None
        if maker is not None and maker != reader:
            self.read_by.setdefault(maker, set()).add(reader)

    def enter(self, path: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            for leaf in pytree.tree_leaves(args):
                self.reads(leaf, path)
            self.running.append(path)
            self.calls[path] += 1

        return hook

    def leave(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.running.pop()
            if isinstance(output, Tensor):
                self.made_by[id(output)] = path
                self.kept.append(output)

        return hook

    def followers(self) -> dict[str, str]:
        """The only reader of each layer's output, by path, where both run once."""
        alone = {path: next(iter(readers)) for path, readers in self.read_by.items() if len(readers) == 1}
        return {path: reader for path, reader in alone.items() if self.calls[path] == self.calls[reader] == 1}


def fusable(model: nn.Module, *args: Any, **kwargs: Any) -> list[list[str]]:
    """The lists for `fuse_modules`: layers that run once and one after the other, where nothing else reads what is between
    them. The model is run on a copy, with the arguments given, and is not changed."""
    twin, seen = adopt(copy.deepcopy(model)), _Reading()
    for path, layer in checks.layers(twin):
        layer.register_forward_pre_hook(seen.enter(path))
        layer.register_forward_hook(seen.leave(path))
    with torch.no_grad(), seen:
        output = twin(*args, **kwargs)
    for leaf in pytree.tree_leaves(output):
        seen.reads(leaf, "the caller")
    return checks.fusable_runs(twin, seen.followers())
