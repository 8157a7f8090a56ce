"""Which module takes the place of which, for static and dynamic quantization and for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch.ao.quantization.quantization_mappings as theirs
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import quantc.nn.qat as nnqat
import quantc.nn.quantized as nnq
from quantc.errors import QuantcError, UnknownNameError
from quantc.flows.eager import mappings
from quantc.nn import quantizable
from quantc.nn.quantized import dynamic

upstream: Any = theirs


def of_torch(table: dict[Any, Any]) -> dict[Any, str]:
    """The rows of a table whose key is a class of plain torch, by the name of what takes its place."""
    plain = {key: kind for key, kind in table.items() if key.__module__.startswith("torch.nn.modules")}
    return {key: kind.__name__ for key, kind in plain.items()}


@pytest.mark.parametrize(
    "name",
    [
        "get_default_static_quant_module_mappings",
        "get_default_dynamic_quant_module_mappings",
        "get_default_qat_module_mappings",
        "get_embedding_qat_module_mappings",
    ],
)
def test_layers_of_torch_become_what_they_become_there(name: str) -> None:
    ours, wanted = of_torch(getattr(mappings, name)()), of_torch(getattr(upstream, name)())
    if "dynamic" in name:
        del wanted[NonDynamicallyQuantizableLinear]  # the one in attention, which is swapped whole here
    assert {key: ours.get(key) for key in wanted} == wanted


def test_tables_are_handed_out_as_copies() -> None:
    mappings.get_default_static_quant_module_mappings().clear()
    mappings.get_default_qat_module_mappings().clear()
    assert nn.Linear in mappings.get_default_static_quant_module_mappings()
    assert nn.Linear in mappings.get_default_qat_module_mappings()


def test_a_class_of_the_callers_own_wins() -> None:
    assert mappings.get_static_quant_module_class(nn.Linear) is nnq.Linear
    assert mappings.get_static_quant_module_class(nn.Linear, {nn.Linear: nnq.Conv2d}) is nnq.Conv2d
    assert mappings.get_dynamic_quant_module_class(nn.Linear) is dynamic.Linear
    assert mappings.get_dynamic_quant_module_class(nn.Bilinear, {nn.Bilinear: nnq.Linear}) is nnq.Linear


def test_a_class_without_counterpart_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(mappings.NoCounterpartError, match="Bilinear") as caught:
        mappings.get_static_quant_module_class(nn.Bilinear)
    assert isinstance(caught.value, UnknownNameError)
    assert isinstance(caught.value, AssertionError)
    assert "Conv2d" in str(caught.value.advice)
    with pytest.raises(mappings.NoCounterpartError, match="softmax"):
        mappings.get_quantized_operator(F.softmax)


def test_functions_have_the_counterparts_of_torch() -> None:
    theirs = upstream.get_default_float_to_quantized_operator_mappings()
    for function in mappings.get_default_float_to_quantized_operator_mappings():
        assert mappings.get_quantized_operator(function).__name__ == theirs[function]._qualified_op_name.split("::")[1]


def test_reference_modules_are_refused() -> None:
    for ask in (
        mappings.get_default_static_quant_reference_module_mappings,
        lambda: mappings.get_static_quant_module_class(nn.Linear, is_reference=True),
    ):
        with pytest.raises(QuantcError, match="Program"):
            ask()


def test_trained_tables_are_static_only_if_asked_for() -> None:
    assert nnqat.Embedding not in mappings.get_default_static_quant_module_mappings()
    assert mappings.get_embedding_static_quant_module_mappings()[nnqat.Embedding] is nnq.Embedding
    assert nn.EmbeddingBag not in mappings.get_default_qat_module_mappings()


def test_what_is_observed_is_what_can_be_swapped() -> None:
    listed = mappings.get_default_qconfig_propagation_list()
    assert {nn.Linear, nn.LSTM, nnqat.Linear, nn.Sequential} <= listed
    assert nn.Dropout in listed
    assert nn.ReLU not in listed
    compared = mappings.get_default_compare_output_module_list()
    assert compared > listed
    assert {nnq.Linear, dynamic.LSTM} <= compared - listed


def test_custom_modules_go_from_float_over_observed_to_quantized() -> None:
    found = mappings.get_default_custom_config_dict()
    observed = found["float_to_observed_custom_module_class"]
    quantized = found["observed_to_quantized_custom_module_class"]
    assert {kind: quantized[observed[kind]] for kind in observed} == {
        nn.LSTM: nnq.LSTM,
        nn.MultiheadAttention: nnq.MultiheadAttention,
    }
    assert mappings.no_observer_set() == {quantizable.LSTM, quantizable.MultiheadAttention}


@pytest.mark.parametrize(("kind", "scale"), [(nn.Sigmoid, 1 / 256), (nn.Tanh, 2 / 256), (nn.Softmax, 1 / 256)])
def test_ranges_that_are_known_are_fixed_in_training_alone(kind: type[nn.Module], scale: float) -> None:
    module = kind()
    assert mappings._has_special_act_post_process(module)
    assert float(mappings._get_special_act_post_process(module)().scale) == scale
    assert not mappings._has_special_act_post_process(module.eval())
    assert not mappings._has_special_act_post_process(nn.Linear(2, 2))
