"""`convert` and `swap_module`: quantized modules in the place of float ones."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from quantc.errors import QuantcError
from quantc.flows.eager import checks
from quantc.flows.eager.attach_observers import FUNCTIONALS, is_observer_hook, observer_of, one_device, remove_qconfig
from quantc.flows.eager.faults import (
    Accept,
    NothingQuantizedError,
    NotObservedError,
    SwapError,
    UnfusedWarning,
    accepted_checks,
    settle,
)
from quantc.flows.eager.layer_runs import HOOKS, Ledger, ledger_of, unwatch
from quantc.flows.eager.mappings import (
    get_default_custom_config_dict,
    get_default_dynamic_quant_module_mappings,
    get_default_static_quant_module_mappings,
    reference_refused,
)
from quantc.flows.eager.propagate import is_dynamic, qconfig_of
from quantc.flows.eager.trial_run import trained_limits, try_out
from quantc.flows.foreign_observers import has_seen
from quantc.nn.intrinsic import _FusedModule
from quantc.nn.observers import UnobservedWarning
from quantc.nn.quantized.modules.linear import Quantize
from quantc.nn.quantized.modules.stepwise import SWAP_STEPS
from quantc.verify.finite_constants import refuse_unsound_module

Mapped = Mapping[Any, Any]


def convert(
    module: nn.Module,
    mapping: Mapped | None = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    is_reference: bool = False,
    convert_custom_config_dict: Mapping[str, Any] | None = None,
    use_precomputed_fake_quant: bool = False,
    *,
    accept: Accept = (),
) -> nn.Module:
    """Put quantized modules in the place of a model's float ones, with weights quantized and scales from their observers.

    `mapping` says which class becomes which. Without it, layers whose qconfig has scales found at run time become dynamic
    ones, and all others static ones. Layers without data, layers that ran several times in one call, and training mode are
    errors that `accept` can name as meant. The result is run once on what calibration last saw, so that floats that meet
    quantized layers are an error here, with the path, and not where it is deployed.
    """
    accepted_checks(accept)
    if is_reference:
        raise reference_refused()
    refuse_unsound_module(module)
    ledger = ledger_of(module)
    known = {**get_default_static_quant_module_mappings()} if mapping is None else mapping
    settle(checks.in_training(module, "quantized models are for inference"), accept)
    settle(checks.not_observed(module, known, ledger), accept)
    if ledger is not None:
        settle(checks.reused_layers(module, ledger), accept)
        _warn_unfused(module, ledger)
    model = module if inplace else copy.deepcopy(module)
    blind, limits = _without_data(model), trained_limits(model)
    custom = convert_custom_config_dict or get_default_custom_config_dict()
    observed = custom.get("observed_to_quantized_custom_module_class", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnobservedWarning)  # of those without data there was an end above
        swapped = swap_modules(model, mapping, observed, use_precomputed_fake_quant)
    if not swapped:
        raise _nothing_swapped(model)
    for path in blind:
        model.get_submodule(path).activation_post_process = Unobserved(path)
    unwatch(model)
    if remove_qconfig:
        _remove(model)
    if ledger is not None and ledger.inputs is not None and "missing-stub" not in accepted_checks(accept):
        try_out(model, ledger, limits)
    return model


_remove = remove_qconfig


def swap_modules(
    module: nn.Module, mapping: Mapped | None, custom: Mapped | None = None, use_precomputed_fake_quant: bool = False
) -> int:
    """Swap the modules in a model, in place; how many were. A module at two places is one module afterwards too."""
    custom = custom or {}
    made: dict[int, nn.Module] = {}
    count = 0
    pending = [("", module)]
    while pending:
        start, parent = pending.pop()
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if id(child) not in made:
                path = f"{start}{name}"
                made[id(child)] = _swap_at(path, child, mapping, custom, use_precomputed_fake_quant)
                is_new = made[id(child)] is not child
                count += is_new
                if not is_new and not isinstance(child, _FusedModule):
                    pending.append((f"{path}.", child))
            parent._modules[name] = made[id(child)]
    _one_by_one(module)
    return count


def _swap_at(path: str, module: nn.Module, *how: Any) -> nn.Module:
    try:
        made = swap_module(module, *how)
        if isinstance(made, Quantize):
            made.place = path
        return made
    except QuantcError as error:
        raise SwapError(
            f"{type(module).__name__} cannot be swapped: {error.what}", where=path, advice=error.advice
        ) from error


def _one_by_one(model: nn.Module) -> None:
    """Disable the fast path of encoders with quantized layers: it reads the weights of float ones."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not _is_float(module):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder) and not all(map(_is_float, module.layers)):
            module.use_nested_tensor = False


def _is_float(layer: Any) -> bool:
    linears = all(isinstance(linear, nn.Linear) for linear in (layer.linear1, layer.linear2))
    return linears and isinstance(layer.self_attn, nn.MultiheadAttention)


def swap_module(
    mod: nn.Module,
    mapping: Mapped | None,
    custom_module_class_mapping: Mapped | None = None,
    use_precomputed_fake_quant: bool = False,
) -> nn.Module:
    """The quantized module for one that has a qconfig; the module itself if there is none. Hooks and device are kept."""
    qconfig = qconfig_of(mod)
    if qconfig is None:
        return mod
    kind = type_before_parametrizations(mod)
    custom = custom_module_class_mapping or {}
    table = mapping if mapping is not None else _mapping_for(qconfig)
    if kind in custom:
        new = custom[kind].from_observed(mod)
    elif kind in table:
        make = table[kind].from_float
        precomputed = {"use_precomputed_fake_quant": use_precomputed_fake_quant}
        new = make(mod, **(precomputed if "use_precomputed_fake_quant" in inspect.signature(make).parameters else {}))
    else:
        return mod
    _keep_hooks(mod, new)
    device = one_device(mod, "swap_module")
    swapped: nn.Module = new.to(device) if device is not None else new
    return swapped


def _mapping_for(qconfig: Any) -> Mapped:
    dynamic = is_dynamic(qconfig)
    return get_default_dynamic_quant_module_mappings() if dynamic else get_default_static_quant_module_mappings()


def _keep_hooks(old: nn.Module, new: nn.Module) -> None:
    """Hooks of users' own go on, on quantized tensors now."""
    for key, before in old._forward_pre_hooks.items():
        if not is_observer_hook(before) and not isinstance(before, HOOKS):
            new.register_forward_pre_hook(before, with_kwargs=key in old._forward_pre_hooks_with_kwargs)
    for key, after in old._forward_hooks.items():
        if not is_observer_hook(after) and not isinstance(after, HOOKS):
            new.register_forward_hook(after, with_kwargs=key in old._forward_hooks_with_kwargs)


class Unobserved(nn.Module):
    """On the result of a functional module whose observer saw none."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, x: Any) -> Any:
        raise NotObservedError(
            "its result has no scale: nothing was added, multiplied or joined here while the model was calibrated",
            where=self.path,
            advice="calibrate with data that reaches it; sums and products with numbers need no scale",
        )


def _without_data(prepared: nn.Module) -> list[str]:
    """The functional modules whose observers saw nothing: perhaps they are for sums with numbers alone."""
    functionals = [(path, module) for path, module in checks.layers(prepared) if isinstance(module, FUNCTIONALS)]
    observers = ((path, observer_of(module)) for path, module in functionals)
    return [path for path, observer in observers if observer is not None and not has_seen(observer)]


def _nothing_swapped(model: nn.Module) -> NothingQuantizedError:
    if qconfig_of(model) is not None and not model._modules.keys() - {"activation_post_process"}:
        return NothingQuantizedError(
            f"the model is a single {type(model).__name__}, which cannot be swapped inside itself",
            advice="wrap it first: QuantWrapper(model), or nn.Sequential(model) for dynamic quantization",
        )
    return NothingQuantizedError(
        "nothing was quantized: no module has both a qconfig and a quantized counterpart",
        advice="prepare and calibrate the model first; qconfigs are attributes of the model or of its parts",
    )


def _warn_unfused(model: nn.Module, ledger: Ledger) -> None:
    found = checks.fusable_runs(model, ledger.read_by)
    if found:
        warnings.warn(
            f"these layers run one after the other and are quantized apart, which is slower and less exact; "
            f"where nothing else reads what is between them (fusable(model, x) tells), fuse them before prepare: "
            f"fuse_modules(model, {found})",
            UnfusedWarning,
            stacklevel=3,
        )


SWAP_STEPS[:] = [lambda module: swap_modules(module, None)]
