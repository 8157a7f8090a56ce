"""Copies of a model: as it is, whatever it has kept of its calls, and back to that after it was traced."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every `nn.Module`."""
_OURS = frozenset({"_auto_quant_path"})


class _Detaching(TorchFunctionMode):
    """Lets tensors be copied that were computed with gradients: torch refuses to, but models keep such tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            x, memo = args
            memo[id(x)] = made = x.detach().clone()
            return made
        return func(*args, **(kwargs or {}))


def copy_model(model: nn.Module) -> nn.Module:
    """A copy of a model. Tensors that it has kept of an earlier call are copied without their history."""
    with _Detaching():
        return copy.deepcopy(model)


def changed_names(own: nn.Module, model: nn.Module) -> frozenset[str]:
    """The parameters and buffers of a copy that are no longer those of the model, by name."""
    before = {name: tensor for rows in (model.named_parameters(), model.named_buffers()) for name, tensor in rows}
    now = {name: tensor for rows in (own.named_parameters(), own.named_buffers()) for name, tensor in rows}
    return frozenset(name for name, tensor in before.items() if not _is_same(tensor, now.get(name)))


def take_back(own: nn.Module, model: nn.Module) -> None:
    """Let a copy that was run be again as the model is of which it is a copy: what it has kept of the runs is gone."""
    twins = dict(own.named_modules(remove_duplicate=False))
    memo: dict[int, Any] = {}
    rows: list[tuple[nn.Module, nn.Module]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        twin = twins.get(name)
        if twin is None or twin is module or isinstance(module, torch.jit.ScriptModule):
            continue
        rows.append((module, twin))
        memo[id(module)] = twin
        for key, parameter in module._parameters.items():
            own_parameter = twin._parameters.get(key)
            if parameter is not None and own_parameter is not None and not _is_same(parameter, own_parameter):
                with torch.no_grad():
                    own_parameter.data.copy_(parameter)
            memo[id(parameter)] = own_parameter
        for key, buffer in module._buffers.items():
            if not _is_same(buffer, twin._buffers.get(key)):
                with _Detaching():
                    twin._buffers[key] = copy.deepcopy(buffer, memo)
            memo[id(buffer)] = twin._buffers[key]
    for module, twin in rows:
        _take_back_attributes(module, twin, memo)


def _take_back_attributes(module: nn.Module, twin: nn.Module, memo: dict[int, Any]) -> None:
    before, now = vars(module), vars(twin)
    for key in [key for key in now if key not in before and key not in _OURS]:
        del now[key]
    for key, value in before.items():
        if key not in _OF_TORCH:
            with _Detaching():
                now[key] = copy.deepcopy(value, memo)


def _is_same(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)
