"""Tables of module replacements for static, dynamic and QAT quantization, as copies that callers may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import type_before_parametrizations

import quantc.nn.qat as nnqat
import quantc.nn.quantized as nnq
from quantc.errors import QuantcError, UnknownNameError
from quantc.nn import quantizable
from quantc.nn.fake_quantize import (
    default_fixed_qparams_range_0to1_fake_quant,
    default_fixed_qparams_range_neg1to1_fake_quant,
)
from quantc.nn.module_tables import DYNAMIC_MODULES, QAT_MODULES, STATIC_MODULES
from quantc.nn.stubs import DeQuantStub, QuantStub

Mapped = dict[Any, Any]


_TABLES = (nn.Embedding, nn.EmbeddingBag)
_TRAINED_TABLES = (nnqat.Embedding, nnqat.EmbeddingBag)


def _without(table: Mapping[Any, Any], *kinds: Any) -> Mapped:
    return {key: value for key, value in table.items() if key not in kinds}


DEFAULT_STATIC_QUANT_MODULE_MAPPINGS: Mapped = {
    QuantStub: nnq.Quantize,
    DeQuantStub: nnq.DeQuantize,
    **_without(STATIC_MODULES, nn.Sigmoid, *_TRAINED_TABLES),
}
"""Replacements by `convert`: modules on quantized tensors, for float modules and trained ones. Sigmoids stay: they take
quantized tensors, and their output range is known."""

DEFAULT_QAT_MODULE_MAPPINGS: Mapped = {
    **_without(QAT_MODULES, *_TABLES),
    NonDynamicallyQuantizableLinear: nnqat.Linear,
}
"""For `prepare_qat`: what rounds its weight in training in place of a float module."""

DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS: Mapped = dict(DYNAMIC_MODULES)
"""For `quantize_dynamic`: what has a quantized weight, and reads and yields floats."""

DEFAULT_MODULE_TO_ACT_POST_PROCESS: Mapped = {
    nn.Hardsigmoid: default_fixed_qparams_range_0to1_fake_quant,
    nn.Sigmoid: default_fixed_qparams_range_0to1_fake_quant,
    nn.Softmax: default_fixed_qparams_range_0to1_fake_quant,
    nn.Tanh: default_fixed_qparams_range_neg1to1_fake_quant,
}
"""In training: results whose range is known beforehand."""

DEFAULT_FLOAT_TO_QUANTIZED_OPERATOR_MAPPINGS: Mapped = {
    F.elu: nnq.functional.elu,
    F.hardswish: nnq.functional.hardswish,
    F.leaky_relu: nnq.functional.leaky_relu,
}

_ALSO_PROPAGATED = {nn.Sequential}


class NoCounterpartError(UnknownNameError, AssertionError):
    """A module class or function that has no quantized counterpart."""


def get_default_static_quant_module_mappings() -> Mapped:
    return dict(DEFAULT_STATIC_QUANT_MODULE_MAPPINGS)


def get_default_qat_module_mappings() -> Mapped:
    return dict(DEFAULT_QAT_MODULE_MAPPINGS)


def get_default_dynamic_quant_module_mappings() -> Mapped:
    return dict(DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS)


def get_embedding_static_quant_module_mappings() -> Mapped:
    """With those for embeddings that were trained."""
    return {**DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, **{kind: STATIC_MODULES[kind] for kind in _TRAINED_TABLES}}


def get_embedding_qat_module_mappings() -> Mapped:
    """With those that round the tables of embeddings in training."""
    return {**DEFAULT_QAT_MODULE_MAPPINGS, **{kind: QAT_MODULES[kind] for kind in _TABLES}}


def get_default_static_quant_reference_module_mappings() -> Mapped:
    raise reference_refused()


def reference_refused() -> QuantcError:
    """Reference modules are what the Q/DQ form of a Program is."""
    return QuantcError(
        "there are no reference modules: the reference form of a model is a Program in Q/DQ form",
        where="is_reference",
        advice="program = to_program(prepared, example_inputs); qc.convert(program)",
    )


def get_static_quant_module_class(
    float_module_class: Any,
    additional_static_quant_mapping: Mapping[Any, Any] | None = None,
    is_reference: bool = False,
) -> Any:
    """The class that takes the place of a float one in static quantization."""
    if is_reference:
        raise reference_refused()
    return _counterpart(
        float_module_class, {**DEFAULT_STATIC_QUANT_MODULE_MAPPINGS, **(additional_static_quant_mapping or {})}
    )


def get_dynamic_quant_module_class(
    float_module_class: Any, additional_dynamic_quant_mapping: Mapping[Any, Any] | None = None
) -> Any:
    """The class that takes the place of a float one in dynamic quantization."""
    return _counterpart(
        float_module_class, {**DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS, **(additional_dynamic_quant_mapping or {})}
    )


def get_default_float_to_quantized_operator_mappings() -> Mapped:
    return dict(DEFAULT_FLOAT_TO_QUANTIZED_OPERATOR_MAPPINGS)


def get_quantized_operator(float_op: Any) -> Callable[..., Any]:
    """The function that takes the place of a float one."""
    found: Callable[..., Any] = _counterpart(float_op, DEFAULT_FLOAT_TO_QUANTIZED_OPERATOR_MAPPINGS)
    return found


def _counterpart(given: Any, mapping: Mapping[Any, Any]) -> Any:
    if given in mapping:
        return mapping[given]
    known = ", ".join(sorted({getattr(key, "__name__", str(key)) for key in mapping}))
    raise NoCounterpartError(
        f"{getattr(given, '__name__', given)} has no quantized counterpart",
        advice=f"give one in the additional mapping; known: {known}",
    )


def get_default_qconfig_propagation_list() -> set[Any]:
    """The classes of layers that are given observers."""
    tables = (
        DEFAULT_STATIC_QUANT_MODULE_MAPPINGS,
        DEFAULT_QAT_MODULE_MAPPINGS,
        DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS,
    )
    return {key for table in tables for key in table} | _ALSO_PROPAGATED


def get_default_compare_output_module_list() -> set[Any]:
    """The classes of layers whose results are worth comparing, float and quantized."""
    tables = (
        DEFAULT_STATIC_QUANT_MODULE_MAPPINGS,
        DEFAULT_QAT_MODULE_MAPPINGS,
        DEFAULT_DYNAMIC_QUANT_MODULE_MAPPINGS,
    )
    return get_default_qconfig_propagation_list() | {value for table in tables for value in table.values()}


def get_default_custom_config_dict() -> dict[str, Any]:
    """Modules of several steps, each of which is observed: float to observed, and observed to quantized. Users may give
    others."""
    return {
        "float_to_observed_custom_module_class": {
            nn.LSTM: quantizable.LSTM,
            nn.MultiheadAttention: quantizable.MultiheadAttention,
        },
        "observed_to_quantized_custom_module_class": {
            quantizable.LSTM: nnq.LSTM,
            quantizable.MultiheadAttention: nnq.MultiheadAttention,
        },
    }


def no_observer_set() -> set[Any]:
    """Observed classes whose steps have observers, and which have none themselves."""
    return {quantizable.LSTM, quantizable.MultiheadAttention}


def _get_special_act_post_process(module: torch.nn.Module) -> Any:
    return DEFAULT_MODULE_TO_ACT_POST_PROCESS.get(type_before_parametrizations(module))


def _has_special_act_post_process(module: torch.nn.Module) -> bool:
    return module.training and type(module) in DEFAULT_MODULE_TO_ACT_POST_PROCESS
