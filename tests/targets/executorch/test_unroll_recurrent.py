"""Recurrent layers as loops: what ATen's ops compute, with a body that is written once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.targets.executorch.unroll_recurrent import unrolled_loop
from tests.support.executorch_models import (
    NEAR,
    relative,
    without_data,
)

RECURRENT: dict[str, nn.Module] = {
    "lstm": nn.LSTM(6, 5, num_layers=2, batch_first=True),
    "bidirectional lstm": nn.LSTM(6, 5, bidirectional=True),
    "gru": nn.GRU(6, 5, num_layers=2, bidirectional=True, batch_first=True),
    "rnn": nn.RNN(6, 5, bias=False),
    "relu": nn.RNN(6, 5, nonlinearity="relu"),
}


OPS: dict[str, tuple[str, Any]] = {
    "lstm": ("lstm", torch.ops.aten.lstm.input),
    "bidirectional lstm": ("lstm", torch.ops.aten.lstm.input),
    "gru": ("gru", torch.ops.aten.gru.input),
    "rnn": ("rnn_tanh", torch.ops.aten.rnn_tanh.input),
    "relu": ("rnn_relu", torch.ops.aten.rnn_relu.input),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_loops_compute_what_atens_recurrent_ops_do(name: str) -> None:
    op, target = OPS[name]
    made: Any = RECURRENT[name]
    states = made.num_layers * (2 if made.bidirectional else 1)
    x, batch = torch.randn(3, 4, 6), 3 if made.batch_first else 4
    hx = [torch.randn(states, batch, 5) for _ in range(2 if op == "lstm" else 1)]
    rest = (made.bias, made.num_layers, 0.0, False, made.bidirectional, made.batch_first)
    args = (x, hx if op == "lstm" else hx[0], made._flat_weights, *rest)
    with torch.no_grad():
        for got, want in zip(unrolled_loop(op)(*args), target(*args), strict=True):
            torch.testing.assert_close(got, want)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 16, bidirectional=True, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.rnn(x)[0])


@pytest.mark.slow
def test_a_recurrent_layer_is_a_loop_around_products_in_the_delegate() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 20, 16)
    program = without_data(Tagger(), x, mode="dynamic")
    lowered = qc.lower(program, "executorch")
    assert relative(program(x), lowered(x)) < NEAR
    assert "scan" in lowered.delegation().others
    row = lowered.delegation().row("lstm")
    assert row is not None
    assert "its state is float" in row.why
    assert len(lowered.content) < 60_000, "as long as it would be for any number of steps"
