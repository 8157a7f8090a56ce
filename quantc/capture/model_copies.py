"""Copies of a model for capture, so that `forward` has no effect on the caller's."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterator, MutableMapping
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree


class Tensors(Enum):
    """Treatment of tensors when a model is copied."""

    SHARED = "the copy holds the model's own tensors"
    COPIED = "the copy may be run: what it writes stays in it"


def twin(model: nn.Module, tensors: Tensors) -> nn.Module:
    """A copy of the modules. Ties between tensors stay; objects that cannot be copied (a lock, an open file) are shared."""
    memo: dict[int, Any] = {}
    for tensor in _tensors_of(model):
        memo[id(tensor)] = tensor if tensors is Tensors.SHARED else _copy_tensor(tensor)
    return copied_module(model, memo)


def copied_module(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy`, except that objects that refuse to be copied are shared."""
    try:
        return copy.deepcopy(model, ChainMap({}, memo))  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - a copy runs the user's code, and any failure has the same way out
        return _rebuilt(model, memo)


def cloned_inputs(tree: Any) -> Any:
    """Inputs for a run that may write to them. Aliased inputs become separate: a program is for any inputs."""
    return pytree.tree_map_only(torch.Tensor, _copy_tensor, tree)


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if is_lazy(tensor):
        return tensor
    data = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, tensor.requires_grad)
    return data.requires_grad_(tensor.requires_grad)


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        plain = [value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        yield from (leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor))


def _rebuilt(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy module by module and attribute by attribute, so that only what refuses is shared."""
    known: ChainMap[int, Any] = ChainMap({}, memo)
    modules = list(model.modules())
    for module in modules:
        is_rebuildable = not isinstance(module, torch.jit.ScriptModule)
        known[id(module)] = module.__new__(type(module)) if is_rebuildable else module
    for module in modules:
        made = known[id(module)]
        if made is not module:
            made.__dict__.update({name: _copy_value(value, known) for name, value in vars(module).items()})
    found: nn.Module = known[id(model)]
    return found


def _copy_value(value: Any, known: MutableMapping[int, Any]) -> Any:
    attempt: ChainMap[int, Any] = ChainMap({}, known)
    try:
        result = copy.deepcopy(value, attempt)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - as above; half-made copies stay in `attempt`, which goes
        return value
    known.update(attempt.maps[0])
    return result
