"""Recurrent layers that find scales as they run: packed sequences, states and single sequences."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from quantc.nn.quantized import dynamic
from tests.support.dynamic_cases import QCONFIGS, furthest, pair_of
from tests.support.nn_cases import engine


@pytest.mark.parametrize("kind", QCONFIGS)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences(name: str, kind: str, enforce_sorted: bool) -> None:
    with engine("x86"):
        ours, theirs, _ = pair_of(name, kind)
        lengths = [6, 4, 1] if enforce_sorted else [1, 6, 4]
        x = pack_padded_sequence(torch.randn(6, 3, 8), lengths, enforce_sorted=enforce_sorted)
        layers = ours.num_layers
        state = [torch.randn(layers, 3, 12) for _ in range(ours.states)]
        hx = tuple(state) if len(state) > 1 else state[0]
        for args in ((x,), (x, hx)):
            (mine, last), (other, their_last) = ours(*args), theirs(*args)
            assert furthest(mine.data, other.data) < 1e-6
            assert furthest(last, their_last) < 1e-6


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
@pytest.mark.parametrize("kind", QCONFIGS)
def test_plain_recurrent_layers(nonlinearity: str, kind: str) -> None:
    """torch.ao has none: they are close to float, and a layer is its cell, step by step."""
    torch.manual_seed(0)
    layer = nn.RNN(8, 12, nonlinearity=nonlinearity).eval()
    layer.qconfig = QCONFIGS[kind]
    made = dynamic.RNNBase.from_float(layer)
    x = torch.randn(6, 3, 8)
    found, last = made(x)
    assert furthest(found, layer(x)[0]) < 0.05
    assert torch.equal(found[-1], last[0])
    assert made.mode == f"RNN_{nonlinearity.upper()}"


@pytest.mark.parametrize("kind", QCONFIGS)
@pytest.mark.parametrize("name", ["LSTM", "GRU"])
def test_recurrent_layers_without_bias_of_one_sequence_from_a_state(name: str, kind: str) -> None:
    """What torch.ao refuses, held to float."""
    torch.manual_seed(0)
    layer = getattr(nn, name)(8, 12, 2, bias=False, dropout=0.5).eval()
    layer.qconfig = QCONFIGS[kind]
    made = getattr(dynamic, name).from_float(layer)
    state = [torch.randn(2, 3, 12) for _ in range(made.states)]
    for x, parts in ((torch.randn(6, 3, 8), state), (torch.randn(6, 8), [part[:, 0] for part in state])):
        hx = tuple(parts) if len(parts) > 1 else parts[0]
        assert furthest(made(x, hx), layer(x, hx)) < 0.1
        assert furthest(made(x), layer(x)) < 0.1
    cell = getattr(nn, f"{name}Cell")(8, 12, bias=False)
    cell.qconfig = QCONFIGS[kind]
    step = getattr(dynamic, f"{name}Cell").from_float(cell)
    assert furthest(step(torch.ones(8)), cell(torch.ones(8))) < 0.1
