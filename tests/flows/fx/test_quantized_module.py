"""What convert_fx gives: a module on int8 kernels, copied and saved, that may take and give quantized tensors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import quantc as qc
from quantc.errors import ConfigError, InputError
from quantc.flows.fx import (
    ConvertCustomConfig,
    PrepareCustomConfig,
    QuantizedGraphModule,
    convert_fx,
    get_default_qconfig_mapping,
    prepare_fx,
)
from tests.support.fx_small import batches, layers, prepared_layers


def test_a_quantized_model_is_copied_saved_and_loaded(tmp_path: Path) -> None:
    quantized, x = convert_fx(prepared_layers()), batches()[0]
    expected = quantized(x)
    assert isinstance(quantized, QuantizedGraphModule)
    assert torch.equal(copy.deepcopy(quantized)(x), expected)
    quantized.save(tmp_path / "model.qc")
    assert torch.equal(qc.load(tmp_path / "model.qc")(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(quantized))(x), expected)  # noqa: S301 - our own
    other = convert_fx(prepared_layers())
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(other(x), expected)
    assert all(value.dtype is not torch.float32 or value.dim() < 2 for value in quantized.state_dict().values())


def test_quantized_weights_take_a_quarter() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(256, 256)).eval(), torch.randn(4, 256)
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,))
    prepared(x)
    quantized = convert_fx(prepared)
    assert quantized.memory().share < 0.27


def test_attributes_are_preserved() -> None:
    model: Any = layers()
    model.version, model.labels = 3, ["a", "b"]
    custom = PrepareCustomConfig().set_preserved_attributes(["version", "labels"])
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (batches()[0],), custom)
    assert (prepared.version, copy.deepcopy(prepared).labels) == (3, ["a", "b"])
    prepared(batches()[0])
    quantized = convert_fx(prepared, ConvertCustomConfig().set_preserved_attributes(["version"]))
    assert (quantized.version, copy.deepcopy(quantized).labels) == (3, ["a", "b"])
    with pytest.raises(AttributeError):
        quantized.missing  # noqa: B018


def test_inputs_and_outputs_that_are_quantized_tensors() -> None:
    prepared = prepared_layers({"input_quantized_idxs": [0], "output_quantized_idxs": [0]})
    quantized, x = convert_fx(prepared), batches()[0]
    scale, zero_point = prepared.activation_post_process_0.calculate_qparams()
    given = torch.quantize_per_tensor(x, float(scale), int(zero_point), torch.quint8)
    made = quantized(given)
    assert made.dtype is torch.quint8
    assert made.q_scale() == pytest.approx(float(prepared.activation_post_process_2.calculate_qparams()[0]))
    assert torch.equal(made.dequantize(), convert_fx(prepared_layers())(given.dequantize()))
    assert torch.equal(copy.deepcopy(quantized)(given).int_repr(), made.int_repr())
    with pytest.raises(InputError, match="input 0 is not a quantized tensor"):
        quantized(x)


def test_an_output_that_is_float_is_not_given_quantized() -> None:
    mapping = get_default_qconfig_mapping().set_module_name("2", None)
    with pytest.raises(ConfigError, match="output 0 is not quantized"):
        convert_fx(prepared_layers({"output_quantized_idxs": 0}, mapping))
