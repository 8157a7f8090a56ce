"""Fusing the modules of a model by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from quantc.errors import UnknownNameError, suggest
from quantc.flows.eager.adopt_modules import adopt
from quantc.flows.eager.faults import MODE, Fault, LostHookWarning, as_error, settle
from quantc.flows.eager.fusers import FusionError, get_fuser_method

Names = Sequence[str] | Sequence[Sequence[str]]
FuserFunction = Callable[..., Sequence[nn.Module]]


def fuse_known_modules(
    mod_list: Sequence[nn.Module], is_qat: bool, additional_fuser_method_mapping: Mapping[Any, Any] | None = None
) -> list[nn.Module]:
    """The replacements of these modules: the first does the work of all, the rest are identities.

    Hooks before the first and behind the last are kept; others would see nothing any more, and a warning says so.
    """
    kinds = tuple(type_before_parametrizations(module) for module in mod_list)
    fuser = get_fuser_method(kinds, additional_fuser_method_mapping)
    first, last = mod_list[0], mod_list[-1]
    lost = [type(module).__name__ for module in mod_list[1:] if module._forward_pre_hooks]
    lost += [type(module).__name__ for module in mod_list[:-1] if module._forward_hooks]
    if lost:
        warnings.warn(f"hooks between fused modules are lost: on {', '.join(lost)}", LostHookWarning, stacklevel=2)
    before, after = dict(first._forward_pre_hooks), dict(last._forward_hooks)
    first._forward_pre_hooks.clear()  # folding copies the module, and its hooks with it
    last._forward_hooks.clear()
    try:
        fused = fuser(is_qat, *mod_list).train(first.training)  # a new container is made in training mode
    finally:
        first._forward_pre_hooks.update(before)
        last._forward_hooks.update(after)
    for key, hook in before.items():
        fused.register_forward_pre_hook(hook, with_kwargs=key in first._forward_pre_hooks_with_kwargs)
    for key, hook in after.items():
        fused.register_forward_hook(hook, with_kwargs=key in last._forward_hooks_with_kwargs)
    for module in mod_list:
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return [fused, *(nn.Identity().train(first.training) for _ in mod_list[1:])]


def fuse_modules(
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: FuserFunction = fuse_known_modules,
    fuse_custom_config_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Fuse modules of a model in eval mode: `["conv", "bn", "relu"]`, or a list of such lists. Batch norms are folded."""
    return _fuse_modules(model, modules_to_fuse, False, inplace, fuser_func, fuse_custom_config_dict)


def fuse_modules_qat(
    model: nn.Module,
    modules_to_fuse: Names,
    inplace: bool = False,
    fuser_func: FuserFunction = fuse_known_modules,
    fuse_custom_config_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Fuse modules of a model in training mode. Batch norms are kept and go on learning."""
    return _fuse_modules(model, modules_to_fuse, True, inplace, fuser_func, fuse_custom_config_dict)


def _fuse_modules(
    model: nn.Module,
    modules_to_fuse: Names,
    is_qat: bool,
    inplace: bool = False,
    fuser_func: FuserFunction = fuse_known_modules,
    fuse_custom_config_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Shared body of `fuse_modules` and `fuse_modules_qat`. Checks every list before it fuses the first."""
    lists = _lists(modules_to_fuse)
    known = (fuse_custom_config_dict or {}).get("additional_fuser_method_mapping", {})
    for names in lists:
        _check(model, names)
        if fuser_func is fuse_known_modules:
            _check_count(model, names, known)
    settle(_modes(model, lists, is_qat), "mode" if is_qat else ())
    fused = adopt(model if inplace else copy.deepcopy(model))
    for names in lists:
        modules = [fused.get_submodule(name) for name in names]
        try:
            replaced = fuser_func(modules, is_qat, known)
        except FusionError as error:
            raise FusionError(error.what, where=", ".join(names), advice=error.advice) from error
        for name, module in zip(names, replaced, strict=True):
            set_module(fused, name, module)
    return fused


def _lists(given: Names) -> list[list[str]]:
    names = list(given)
    if all(isinstance(name, str) for name in names):
        return [[str(name) for name in names]] if names else []
    if any(isinstance(name, str) for name in names):
        raise FusionError(
            "names and lists of names are mixed", where=repr(given), advice='write [["conv", "bn"], ["fc", "relu"]]'
        )
    return [[str(name) for name in sequence] for sequence in names]


def _check_count(model: nn.Module, names: Sequence[str], known: Mapping[Any, Any]) -> None:
    """A single module is fused by a method of the user's own alone."""
    if len(names) > 1:
        return
    kind = type_before_parametrizations(model.get_submodule(names[0])) if names else None
    if kind not in known and (kind,) not in known:
        raise FusionError(
            "it takes two modules to fuse",
            where=", ".join(names),
            advice="name those that follow it, or give a fuser_func or additional_fuser_method_mapping for one",
        )


def _check(model: nn.Module, names: Sequence[str]) -> None:
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in paths:
            raise UnknownNameError(
                f"unknown module {name!r} to fuse",
                where=", ".join(names),
                advice=suggest(name, [path for path in paths if path], noun="modules"),
            )
    for path in names:
        same = [other for other, module in model.named_modules(remove_duplicate=False)
                if module is model.get_submodule(path) and other != path]  # fmt: skip
        if same:
            raise FusionError(
                f"{path} is also {', '.join(same)}, and the two would no longer be the same",
                where=", ".join(names),
                advice="give each place a module of its own, then fuse",
            )


def _modes(model: nn.Module, lists: Sequence[Sequence[str]], is_qat: bool) -> list[Fault]:
    wrong = [name for names in lists for name in names if model.get_submodule(name).training is not is_qat]
    if not wrong:
        return []
    if is_qat:
        what = "it is in eval mode, and is fused for training"
        advice = "call model.train() first; for inference use fuse_modules"
    else:
        what = "it is in training mode: a batch norm that learns cannot be folded"
        advice = "call model.eval() first; to train it quantized use fuse_modules_qat"
    faults = [Fault(MODE, name, what, advice) for name in wrong]
    if not is_qat:
        raise as_error(faults, can_accept=False)
    return faults


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


__all__ = ["_fuse_modules", "fuse_known_modules", "fuse_modules", "fuse_modules_qat", "set_module"]
