"""Observers on the layers of a model: where they are put, the hooks that call them, and how they come off again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from quantc.errors import QuantcError
from quantc.flows.eager.faults import AlreadyDoneError, EagerError
from quantc.flows.eager.mappings import (
    _get_special_act_post_process,
    _has_special_act_post_process,
    get_default_qconfig_propagation_list,
    no_observer_set,
)
from quantc.flows.eager.propagate import is_dynamic, is_memoryless, propagate_qconfig_helper, qconfig_of
from quantc.flows.foreign_observers import is_observer
from quantc.nn.fake_quantize import FakeQuantizeBase
from quantc.nn.intrinsic import _FusedModule
from quantc.nn.observers import ObserverBase
from quantc.nn.quantized import FloatFunctional, QFunctional
from quantc.nn.stubs import DeQuantStub

OBSERVER = "activation_post_process"
"""The submodule of a layer that observes what it yields."""
FUNCTIONALS = (FloatFunctional, QFunctional)


def _observer_forward_hook(self: nn.Module, input: Any, output: Any) -> Any:  # noqa: A002 - the name users know
    """Show what a layer yields to its observer."""
    return self.activation_post_process(output)  # type: ignore[operator]


def _observer_forward_pre_hook(self: nn.Module, input: Any) -> Any:  # noqa: A002
    """Show what a layer reads to its observer."""
    return self.activation_post_process(input[0])  # type: ignore[operator]


def register_activation_post_process_hook(module: nn.Module, pre_hook: bool = False) -> None:
    """Register the observer of a layer as the first of its hooks: on its output, or with `pre_hook` on its input."""
    if not hasattr(module, OBSERVER):
        raise EagerError(
            f"{type(module).__name__} has no observer to be called",
            advice=f"give it one first: module.{OBSERVER} = qconfig.activation()",
        )
    if pre_hook:
        module.register_forward_pre_hook(_observer_forward_pre_hook, prepend=True)
    else:
        module.register_forward_hook(_observer_forward_hook, prepend=True)


_register_activation_post_process_hook = register_activation_post_process_hook


def observer_of(module: nn.Module) -> nn.Module | None:
    """The observer of a layer; None if it has none."""
    found = module._modules.get(OBSERVER)
    return found if found is not None and is_observer_like(found) else None


def is_observer_like(module: nn.Module) -> bool:
    """Observers and fake quantizers, of quantc or of others."""
    return isinstance(module, ObserverBase | FakeQuantizeBase) or is_observer(module)


def needs_observation(module: nn.Module) -> bool:
    return qconfig_of(module) is not None


def add_observer(
    module: nn.Module,
    qconfig_propagation_list: Collection[Any] | None = None,
    non_leaf_module_list: Collection[Any] | None = None,
    device: torch.device | None = None,
    custom_module_class_mapping: Mapping[Any, Any] | None = None,
) -> None:
    """Put an observer, with the hook that calls it, on every layer of a model that has a qconfig. In place."""
    kinds = get_default_qconfig_propagation_list() if qconfig_propagation_list is None else qconfig_propagation_list
    adder = _Adder(
        frozenset(kinds), frozenset(non_leaf_module_list or ()), device or one_device(module, "add_observer"),
        dict(custom_module_class_mapping or {}),
    )  # fmt: skip
    adder.visit(module)


add_observer_ = _add_observer_ = add_observer


class _Adder:
    def __init__(
        self, kinds: frozenset[Any], whole: frozenset[Any], device: torch.device | None, custom: dict[Any, Any]
    ) -> None:
        self.kinds = kinds
        self.whole = whole
        self.device = device
        self.custom = custom

    def visit(self, module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            self._child(module, name, child)
        kind = type_before_parametrizations(module)
        is_leaf = is_childless(module) and not isinstance(module, nn.Sequential)
        has_own_rounding = hasattr(module, "weight_fake_quant") and not isinstance(module, nn.Sequential)
        if kind in self.kinds and (is_leaf or has_own_rounding):
            self._put(module)

    def _child(self, parent: nn.Module, name: str, child: nn.Module) -> None:
        kind = type_before_parametrizations(child)
        if kind is nn.Dropout:
            return
        if issubclass(kind, FUNCTIONALS):
            if needs_observation(child):
                child.activation_post_process = self._observer(qconfig_of(child))
        elif isinstance(child, _FusedModule) or kind in self.whole:
            self._put(child)
        elif _has_special_act_post_process(child):
            self._put(child, _get_special_act_post_process(child))
        elif needs_observation(child) and kind in self.custom and not self._finds_scales(child, kind):
            observed: nn.Module = self.custom[kind].from_float(child).train(child.training)
            vars(observed).setdefault("qconfig", qconfig_of(child))
            setattr(parent, name, observed)
            if isinstance(observed, tuple(no_observer_set())):
                propagate_qconfig_helper(observed, {}, qconfig_of(child))
                self.visit(observed)
            else:
                self._put(observed)
        else:
            self.visit(child)

    def _finds_scales(self, child: nn.Module, kind: Any) -> bool:
        """True for a custom multi-step module that is quantized dynamically: it is swapped whole."""
        return self.custom[kind] in no_observer_set() and is_dynamic(qconfig_of(child))

    def _observer(self, qconfig: Any, special: Callable[[], nn.Module] | None = None) -> nn.Module:
        made: nn.Module = (special or qconfig.activation)()
        return made.to(self.device) if self.device is not None else made

    def _put(self, module: nn.Module, special: Callable[[], nn.Module] | None = None) -> None:
        if not needs_observation(module) or isinstance(module, DeQuantStub):
            return
        if OBSERVER in module._modules:
            raise AlreadyDoneError(
                f"{type(module).__name__} has an observer already",
                advice="prepare a float model once; a copy of it can be prepared again",
            )
        module.add_module(OBSERVER, self._observer(qconfig_of(module), special))
        register_activation_post_process_hook(module, pre_hook=is_memoryless(qconfig_of(module)))


def is_childless(module: nn.Module) -> bool:
    """True if a module has no submodules besides parametrizations."""
    return not module._modules or (len(module._modules) == 1 and "parametrizations" in module._modules)


def devices_of(module: nn.Module) -> set[torch.device]:
    """The devices of a module's tensors, meta tensors apart."""
    tensors: tuple[Tensor, ...] = (*module.parameters(), *module.buffers())
    return {tensor.device for tensor in tensors if tensor.device.type != "meta"}


def one_device(module: nn.Module, doing: str) -> torch.device | None:
    """The device of a module; None if it has no tensors."""
    found = devices_of(module)
    if len(found) > 1:
        raise QuantcError(
            f"{doing} needs all tensors of a model on one device",
            where=", ".join(sorted(map(str, found))),
            advice="move the model first: model.to(device)",
        )
    return next(iter(found), None)


def get_observer_dict(mod: nn.Module, target_dict: dict[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """The observers of a model by path, `conv1.activation_post_process`; also put into `target_dict` if that is given."""
    found: dict[str, Any] = {} if target_dict is None else target_dict
    start = f"{prefix}." if prefix else ""
    for path, module in mod.named_modules():
        if OBSERVER in module._modules:
            found[f"{start}{path}.{OBSERVER}" if path else f"{start}{OBSERVER}"] = module._modules[OBSERVER]
    return found


_get_observer_dict = get_observer_dict


def remove_observers(module: nn.Module) -> None:
    """Take observers and the hooks that call them off a model."""
    for layer in module.modules():
        if observer_of(layer) is not None:
            del layer._modules[OBSERVER]
        for hooks in (layer._forward_hooks, layer._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if is_observer_hook(hook)]:
                hooks.pop(key)


def remove_qconfig(module: nn.Module) -> None:
    """Take qconfigs, observers and their hooks off a model."""
    for layer in module.modules():
        vars(layer).pop("qconfig", None)
    remove_observers(module)


_remove_qconfig = remove_qconfig


def is_observer_hook(hook: Any) -> bool:
    return hook is _observer_forward_hook or hook is _observer_forward_pre_hook
