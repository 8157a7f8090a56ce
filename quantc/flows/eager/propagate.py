"""Qconfigs: given to a model or to parts of it, and handed down from each module to those in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from quantc.errors import ConfigError
from quantc.flows.eager.faults import NO_EFFECT, Accept, Fault, settle
from quantc.nn.constructors import Constructor
from quantc.nn.qconfig import QConfig, QConfigAny
from quantc.spec.torch_dtypes import PER_CHANNEL

Key = str | type[nn.Module]
QConfigDict = Mapping[Any, Any]
"""Qconfigs by the path of a module or by its class; None leaves it float."""

CLOSE = 3
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def qconfig_of(module: nn.Module) -> Any:
    """The qconfig of a module; None if it is to stay float or has none."""
    return getattr(module, "qconfig", None)


def is_dynamic(qconfig: Any) -> bool:
    """True if a qconfig quantizes activations dynamically or not at all: only weights are quantized ahead of time."""
    made = _make(getattr(qconfig, "activation", None))
    return bool(getattr(made, "is_dynamic", False)) or type(made).__name__ == "PlaceholderObserver"


def is_memoryless(qconfig: Any) -> bool:
    """True if the activation observer keeps nothing between runs (`averaging_constant` 1): QAT for dynamic quantization."""
    made = _make(getattr(qconfig, "activation", None))
    inner = getattr(made, "activation_post_process", made)
    return getattr(inner, "averaging_constant", None) == 1


def _make(maker: Any) -> Any:
    return maker() if isinstance(maker, type | Constructor) or callable(maker) else None


def propagate_qconfig_(
    module: nn.Module,
    qconfig_dict: QConfigDict | None = None,
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
    *,
    accept: Accept = (),
) -> None:
    """Hand qconfigs down through a model, in place.

    `qconfig_dict` has them by path ("layer1.conv", "" for the model itself) or by class. A qconfig that a module has as its
    attribute wins over one by path, that over one by class, and that over the one of the module around it. A key that
    matches nothing is an error that lists the closest names; `accept="no-effect"` lets it pass.
    """
    given = dict(qconfig_dict or {})
    settle(_find_unmatched(module, given), accept)
    propagate_qconfig_helper(module, given, prepare_custom_config_dict=prepare_custom_config_dict)


propagate_qconfig = propagate_qconfig_
"""The older name."""


def propagate_qconfig_helper(
    module: nn.Module,
    qconfig_dict: QConfigDict,
    qconfig_parent: QConfigAny = None,
    prefix: str = "",
    prepare_custom_config_dict: Mapping[str, Any] | None = None,
) -> None:
    """Give a module its qconfig, `qconfig_parent` if there is no other, and hand it down."""
    by_type = qconfig_dict.get(type_before_parametrizations(module), qconfig_parent)
    chosen = getattr(module, "qconfig", qconfig_dict.get(prefix, by_type))
    check_qconfig(chosen, prefix)
    chosen = along_outputs(module, chosen)
    vars(module)["qconfig"] = chosen
    kept = prepare_custom_config_dict or {}
    for name, child in module.named_children():
        is_whole = name in kept.get("non_traceable_module_name", ())
        if is_whole or type(child) in kept.get("non_traceable_module_class", ()):
            continue
        path = f"{prefix}.{name}" if prefix else name
        propagate_qconfig_helper(child, qconfig_dict, chosen, path, prepare_custom_config_dict)


def along_outputs(module: nn.Module, qconfig: Any) -> Any:
    """The qconfig for a module: weights of transposed convolutions have their outputs on axis 1, and so their scales."""
    made = _make(getattr(qconfig, "weight", None)) if isinstance(module, TRANSPOSED) else None
    if made is None or getattr(made, "qscheme", None) not in PER_CHANNEL or getattr(made, "ch_axis", 1) == 1:
        return qconfig
    return QConfig(activation=qconfig.activation, weight=qconfig.weight.with_args(ch_axis=1))


def check_qconfig(qconfig: Any, path: str = "") -> None:
    """Refuse what is no qconfig: torch's own serve too, since they have the same two fields."""
    if qconfig is None or (hasattr(qconfig, "activation") and hasattr(qconfig, "weight")):
        return
    raise ConfigError(
        f"{qconfig!r} is no qconfig",
        where=f"qconfig of {path or 'the model'}",
        advice="give a QConfig(activation=..., weight=...), a named one such as default_qconfig, or None to stay float",
    )


def own_qconfigs(model: nn.Module) -> dict[str, QConfig]:
    """The qconfigs set on modules, by path, before propagation."""
    return {path: qconfig_of(module) for path, module in model.named_modules() if qconfig_of(module) is not None}


def _find_unmatched(model: nn.Module, given: QConfigDict) -> Iterator[Fault]:
    paths = {path for path, _ in model.named_modules(remove_duplicate=False)}
    classes = {type_before_parametrizations(module) for module in model.modules()}
    for key in given:
        if key in paths or key in classes:
            continue
        is_path = isinstance(key, str)
        shown = repr(key) if is_path else getattr(key, "__name__", repr(key))
        known = sorted(paths - {""}) if is_path else sorted({kind.__name__ for kind in classes})
        close = get_close_matches(str(key) if is_path else shown, known, n=CLOSE, cutoff=0.5)
        closest = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(known) or 'none'}"
        noun = "module of that name" if is_path else "module of that class"
        yield Fault(NO_EFFECT, shown, f"the qconfig for {shown} has no effect: the model has no {noun}", closest)
