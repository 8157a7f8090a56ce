"""What recurrent layers and cells have in common: their weights and biases, by the names of the float module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import SpecError
from quantc.nn import quantize_per_channel, quantize_per_tensor
from quantc.nn.qconfig import float16_dynamic_qconfig
from quantc.nn.quantized import dynamic
from quantc.nn.recurrent_weights import GATES, bias_of

SOURCES: dict[str, Any] = {
    "LSTM": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "GRU": lambda: nn.GRU(3, 4),
    "LSTMCell": lambda: nn.LSTMCell(3, 4),
    "GRUCell": lambda: nn.GRUCell(3, 4),
    "RNNCell": lambda: nn.RNNCell(3, 4),
}


def test_a_bias_is_called_like_its_weight() -> None:
    assert bias_of("weight_ih_l0_reverse") == "bias_ih_l0_reverse"
    assert bias_of("weight_hh") == "bias_hh"


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN_TANH", "RNN_RELU"])
def test_weights_have_as_many_gates_as_torchs(kind: str) -> None:
    mode, _, nonlinearity = kind.partition("_")
    options = {"nonlinearity": nonlinearity.lower()} if nonlinearity else {}
    assert len(getattr(nn, f"{mode}Cell")(3, 4, **options).weight_ih) == 4 * GATES[kind]


@pytest.mark.parametrize("name", SOURCES)
def test_names_and_numbers_are_those_of_the_float_module(name: str) -> None:
    torch.manual_seed(0)
    source = SOURCES[name]()
    made = getattr(dynamic, name).from_float(source)
    floats = {name: parameter.detach() for name, parameter in source.named_parameters()}
    assert {*made.get_weight(), *made.get_bias()} == set(floats)
    for key, weight in made.get_weight().items():
        assert float((weight.dequantize() - floats[key]).abs().max()) <= weight.q_scale() * 0.501
    for key, bias in made.get_bias().items():
        assert torch.equal(bias, floats[key])
        assert bias.data_ptr() != floats[key].data_ptr()
    assert (made.dtype, made.is_half) == (torch.int8, False)


def test_halves_are_the_weights_in_float16() -> None:
    source = nn.GRUCell(3, 4)
    source.qconfig = float16_dynamic_qconfig  # type: ignore[assignment]
    made = dynamic.GRUCell.from_float(source)
    assert (made.dtype, made.is_half) == (torch.float16, True)
    assert torch.equal(made.get_weight()["weight_hh"], source.weight_hh.half())
    assert sorted(made.state_dict()) == ["bias_hh", "bias_ih", "weight_hh", "weight_ih"]


def test_weights_and_biases_that_are_set_are_computed_with() -> None:
    cell, other = (dynamic.RNNCell.from_float(nn.RNNCell(3, 4)) for _ in range(2))
    x = torch.randn(2, 3)
    assert not torch.equal(cell(x), other(x))
    other.set_weight_bias({**cell.get_weight(), **cell.get_bias()})
    assert torch.equal(cell(x), other(x))


def test_weights_without_biases() -> None:
    made = dynamic.GRUCell.from_float(nn.GRUCell(3, 4, bias=False))
    assert made.get_bias() == {"bias_ih": None, "bias_hh": None}
    assert not any("bias" in name for name in made.state_dict())


def test_weights_that_are_not_symmetric_are_refused() -> None:
    cell = dynamic.RNNCell(3, 4)
    shifted = quantize_per_tensor(torch.randn(4, 3), 0.1, 5, torch.int8)
    by_input = quantize_per_channel(torch.randn(4, 3), torch.ones(3), torch.zeros(3, dtype=torch.int64), 1)
    for weight in (shifted, by_input):
        with pytest.raises(SpecError, match="RNNCell"):
            cell.set_weight_bias({"weight_ih": weight, "weight_hh": cell.get_weight()["weight_hh"]})


@pytest.mark.parametrize(("kind", "states"), [("LSTMCell", 2), ("GRUCell", 1), ("RNNCell", 1)])
def test_states_are_given_as_torch_gives_them(kind: str, states: int) -> None:
    cell = getattr(dynamic, kind)(3, 4)
    parts = [torch.zeros(2, 4) for _ in range(states)]
    given = cell.given(parts)
    assert isinstance(given, tuple) == (states > 1)
    assert [id(part) for part in cell.listed(given)] == [id(part) for part in parts]
