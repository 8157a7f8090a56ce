"""Fast copies of the modules that hold a program's tensors.

`copy.deepcopy` rebuilds a dozen hook tables for each module; those of a program have no hooks, and are copied field by
field. Anything but a plain container of tensors is left to `deepcopy`.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

_PLAIN = nn.Module()
_HELD = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"})


def copy_module(root: nn.Module) -> nn.Module:
    """A copy that shares no tensor with `root`. Tensors and modules with two names keep both in the copy."""
    memo: dict[int, Any] = {}
    pending: list[tuple[nn.Module, nn.Module]] = []
    result = _copy_one(root, memo, pending)
    while pending:
        old, new = pending.pop()
        for name, child in old._modules.items():
            new._modules[name] = None if child is None else _copy_one(child, memo, pending)
    return result


def _copy_one(old: nn.Module, memo: dict[int, Any], pending: list[tuple[nn.Module, nn.Module]]) -> nn.Module:
    """A copy of a module and its tensors; its children are added to `pending`."""
    known = memo.get(id(old))
    if isinstance(known, nn.Module):
        return known
    if not _is_plain(old):
        return copy.deepcopy(old, memo)
    new = nn.Module()
    memo[id(old)] = new
    new.training = old.training
    for held, table in ((old._parameters, new._parameters), (old._buffers, new._buffers)):
        for name, tensor in held.items():
            table[name] = copy.deepcopy(tensor, memo)  # type: ignore[assignment]
    new._non_persistent_buffers_set = set(old._non_persistent_buffers_set)
    pending.append((old, new))
    return new


def _is_plain(module: nn.Module) -> bool:
    """True if a module is a plain container of tensors and children: no hooks, no attributes, no subclass."""
    if type(module) is not nn.Module or module.__dict__.keys() != _PLAIN.__dict__.keys():
        return False
    return all(module.__dict__[name] == value for name, value in _PLAIN.__dict__.items() if name not in _HELD)
