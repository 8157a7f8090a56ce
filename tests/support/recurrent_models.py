"""Recurrent layers of every kind, whole and as loops, with their inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quantc.support.sqnr import Noise

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
KINDS = tuple(GATES)


class Whole(nn.Module):
    """A recurrent layer, and all it yields."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Loop(nn.Module):
    """A cell, step by step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Any:
        state, made = None, []
        for item in x.unbind(0):
            state = self.cell(item, state)
            made.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(made)


MODELS: dict[str, Any] = {
    "lstm": lambda: Whole(nn.LSTM(12, 10, 2, bidirectional=True)),
    "lstm without bias": lambda: Whole(nn.LSTM(12, 10, bias=False, batch_first=True)),
    "gru": lambda: Whole(nn.GRU(12, 10, 2, batch_first=True)),
    "rnn": lambda: Whole(nn.RNN(12, 10)),
    "rnn with relu": lambda: Whole(nn.RNN(12, 10, 2, nonlinearity="relu", bidirectional=True)),
    "lstm cell": lambda: Loop(nn.LSTMCell(12, 10)),
    "gru cell": lambda: Loop(nn.GRUCell(12, 10, bias=False)),
    "rnn cell": lambda: Loop(nn.RNNCell(12, 10)),
    "rnn cell with relu": lambda: Loop(nn.RNNCell(12, 10, nonlinearity="relu")),
}
every_model = pytest.mark.parametrize("name", MODELS)


def model_and_input(name: str) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return MODELS[name]().eval(), torch.randn(5, 4, 12)


def noise(expected: Any, found: Any) -> float:
    """dB between all that two calls yield."""
    total = Noise()
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    for left, right in pairs:
        total.add(left, right)
    return total.sqnr
