"""All steps in one call: `quantize`, `quantize_dynamic`, `quantize_qat`; and quantizing and dequantizing around layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from quantc.errors import ConfigError
from quantc.flows.eager.adopt_modules import adopt
from quantc.flows.eager.attach_observers import is_childless, remove_qconfig
from quantc.flows.eager.convert import convert, swap_module, swap_modules
from quantc.flows.eager.faults import Accept, NothingQuantizedError
from quantc.flows.eager.mappings import get_default_dynamic_quant_module_mappings
from quantc.flows.eager.prepare import prepare, prepare_qat
from quantc.flows.eager.propagate import propagate_qconfig_, qconfig_of
from quantc.nn.qconfig import (
    QConfig,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
)
from quantc.nn.stubs import QuantWrapper
from quantc.verify.finite_constants import refuse_unsound_module

_PRODUCTS = (nn.Linear, nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.RNNCell, nn.GRUCell, nn.MultiheadAttention)
_EMBEDDINGS = (nn.EmbeddingBag, nn.Embedding)
DYNAMIC: dict[torch.dtype, tuple[QConfig, tuple[type[nn.Module], ...]]] = {
    torch.qint8: (default_dynamic_qconfig, _PRODUCTS),
    torch.float16: (float16_dynamic_qconfig, _PRODUCTS),
    torch.quint8: (float_qparams_weight_only_qconfig, _EMBEDDINGS),
    torch.quint4x2: (float_qparams_weight_only_qconfig_4bit, (nn.EmbeddingBag,)),
}
"""By dtype of the weights: the default qconfig and layers of `quantize_dynamic`."""


class UnknownDtypeError(ConfigError, ValueError):
    """A dtype that `quantize_dynamic` has no layers for."""


def default_eval_fn(model: nn.Module, calib_data: Iterable[Any]) -> None:
    """Run a model on (data, target) pairs; nothing is done with the targets."""
    for data, _target in calib_data:
        model(data)


def quantize(
    model: nn.Module,
    run_fn: Callable[..., Any],
    run_args: Iterable[Any],
    mapping: Mapping[Any, Any] | None = None,
    inplace: bool = False,
    *,
    accept: Accept = (),
) -> nn.Module:
    """Prepare a model, calibrate it with `run_fn(model, *run_args)`, and convert it. It is put in eval mode."""
    quantized = model if inplace else copy.deepcopy(model)
    prepare(quantized.eval(), inplace=True, accept=accept)
    run_fn(quantized, *run_args)
    return convert(quantized.eval(), mapping, inplace=True, accept=accept)


def quantize_qat(
    model: nn.Module, run_fn: Callable[..., Any], run_args: Iterable[Any], inplace: bool = False, *, accept: Accept = ()
) -> nn.Module:
    """Prepare a model for training, train it with `run_fn(model, *run_args)`, and convert it."""
    trained = model if inplace else copy.deepcopy(model)
    prepare_qat(trained.train(), inplace=True, accept=accept)
    run_fn(trained, *run_args)
    return convert(trained.eval(), inplace=True, accept=accept)


def quantize_dynamic(
    model: nn.Module,
    qconfig_spec: Mapping[Any, Any] | Iterable[Any] | None = None,
    dtype: torch.dtype = torch.qint8,
    mapping: Mapping[Any, Any] | None = None,
    inplace: bool = False,
    *,
    accept: Accept = (),
) -> nn.Module:
    """Quantize the weights of a model ahead, in one call; activations are scaled as it runs. It is put in eval mode.

    `dtype` is torch.qint8 or torch.float16 for linear and recurrent layers and attention, torch.quint8 or torch.quint4x2 for embeddings.
    `qconfig_spec` says which layers: a set of paths and classes, or a dict of them to qconfigs, None to leave one float.
    """
    if dtype not in DYNAMIC and not isinstance(qconfig_spec, Mapping):
        raise UnknownDtypeError(
            f"there are no layers that are quantized to {dtype} by default",
            where=f"dtype={dtype}",
            advice=f"take one of {', '.join(map(str, DYNAMIC))}, or give a dict of qconfigs",
        )
    refuse_unsound_module(model)
    quantized = adopt(model if inplace else copy.deepcopy(model))
    quantized.eval()
    spec = _spec(quantized, qconfig_spec, dtype)
    propagate_qconfig_(quantized, spec, accept=accept)
    table = get_default_dynamic_quant_module_mappings() if mapping is None else mapping
    whole = quantized if inplace else swap_module(quantized, table)
    swapped = swap_modules(quantized, table) if whole is quantized else 1
    remove_qconfig(whole)
    if not swapped:
        raise _nothing(quantized, spec, table)
    return whole


def _spec(model: nn.Module, given: Any, dtype: torch.dtype) -> dict[Any, Any]:
    """Qconfigs by path and class."""
    if isinstance(given, Mapping):
        return dict(given)
    qconfig, kinds = DYNAMIC[dtype]
    if given is not None:
        return dict.fromkeys(given, qconfig)
    present = {type_before_parametrizations(module) for module in model.modules()}
    return dict.fromkeys([kind for kind in kinds if kind in present], qconfig)


def _nothing(model: nn.Module, spec: Mapping[Any, Any], table: Mapping[Any, Any]) -> NothingQuantizedError:
    if type_before_parametrizations(model) in table:
        return NothingQuantizedError(
            f"the model is a single {type(model).__name__}, which cannot be swapped in place",
            advice="leave inplace out, and take what is returned",
        )
    return NothingQuantizedError(
        "the model has no layer that this quantizes",
        where=", ".join(getattr(key, "__name__", str(key)) for key in spec) or "no layers asked for",
        advice="linear, recurrent and embedding layers are; for others use prepare and convert",
    )


def add_quant_dequant(module: nn.Module) -> nn.Module:
    """Put each layer that has a qconfig into a QuantWrapper, in place. A model that is itself a layer comes back wrapped."""
    if is_childless(module) and qconfig_of(module):
        return QuantWrapper(module)
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = add_quant_dequant(child)
    return module
