"""LSTMs and attention of several quantized steps: how they are made, and on which grids they yield."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import RefusedError
from quantc.flows import eager
from quantc.nn import QuantizedTensor, quantizable, quantize_per_tensor, quantized
from quantc.nn.qconfig import get_default_qconfig


class Model(nn.Module):
    """A part that reads quantized tensors and yields a result with something more."""

    def __init__(self, part: nn.Module, reads: int) -> None:
        super().__init__()
        self.quant, self.part, self.reads = eager.QuantStub(), part, reads
        self.dequant = eager.DeQuantStub()

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.dequant(self.part(*[self.quant(x)] * self.reads)[0])
        return made


def observed(part: nn.Module, reads: int, x: Tensor) -> Any:
    """The part of a prepared model that has seen data."""
    model: Any = Model(part, reads).eval()
    model.qconfig = get_default_qconfig("x86")
    prepared: Any = eager.prepare(model)
    prepared(x)
    return prepared.part


def test_an_lstm_yields_quantized_tensors_close_to_the_float_one() -> None:
    torch.manual_seed(0)
    source, x = nn.LSTM(4, 6).eval(), torch.randn(5, 2, 4)
    prepared = observed(source, 1, x)
    assert type(prepared) is quantizable.LSTM
    made: Any = quantized.LSTM.from_observed(prepared)
    assert type(made) is quantized.LSTM
    assert not made.training
    result, (h, c) = made(quantize_per_tensor(x, 0.03, 120))
    with torch.no_grad():
        wanted, (their_h, their_c) = source(x)
    for found, exact in ((result, wanted), (h, their_h), (c, their_c)):
        assert isinstance(found, QuantizedTensor)
        assert float((found.dequantize() - exact).abs().max()) < 0.1
    assert repr(made).startswith("QuantizedLSTM(")


def test_weights_of_attention_are_on_the_grid_of_0_to_1() -> None:
    torch.manual_seed(0)
    source, x = nn.MultiheadAttention(8, 2).eval(), torch.randn(3, 2, 8)
    made: Any = quantized.MultiheadAttention.from_observed(observed(source, 3, x))
    q = quantize_per_tensor(x, 0.03, 120)
    result, weights = made(q, q, q)
    with torch.no_grad():
        wanted, their_weights = source(x, x, x)
    assert weights.grid == (1 / 256, 0)
    assert float((weights.dequantize() - their_weights).abs().max()) < 0.05
    assert float((result.dequantize() - wanted).abs().max()) < 0.15


def test_what_was_observed_is_left_as_it_was() -> None:
    prepared = observed(nn.LSTM(4, 6).eval(), 1, torch.randn(5, 2, 4))
    before = {name: type(part) for name, part in prepared.named_modules()}
    quantized.LSTM.from_observed(prepared)
    assert {name: type(part) for name, part in prepared.named_modules()} == before


@pytest.mark.parametrize("kind", ["LSTM", "MultiheadAttention"])
def test_float_modules_are_not_taken_in_one_step(kind: str) -> None:
    source = getattr(nn, kind)(8, 2)
    with pytest.raises(RefusedError, match=kind) as caught:
        getattr(quantized, kind).from_float(source)
    assert f"quantizable.{kind}" in str(caught.value.advice)
    with pytest.raises(RefusedError, match="observed"):
        getattr(quantized, kind).from_observed(source)
