"""Run-time scales, weights alone, groups of weights, tables and recurrent layers in ExecuTorch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.spec.formats import PerGroup
from quantc.targets.executorch.delegation import RunsOn
from quantc.targets.executorch.unroll_recurrent import unrolled_loop
from tests.support.executorch_models import relative, sqnr, without_data

pytest.importorskip("executorch")
NEAR = 1e-5
GROUPS = PerGroup(axis=1, size=32)
NATIVE: dict[str, tuple[str, qc.QuantSpec | None]] = {
    "dynamic": ("dynamic", None),
    "int8 weights": ("weight-only", None),
    "int4 weights": ("weight-only", qc.INT4_WEIGHT.but(timing="weight-only")),
    "dynamic, int4 weights": ("dynamic", qc.INT4_WEIGHT),
    "dynamic, groups of int4": ("dynamic", qc.INT4_GROUP_SYMMETRIC.but(timing="static", scale_bits=8)),
}
"""What the delegate computes on its own kernels."""
OTHERS: dict[str, tuple[str, qc.QuantSpec]] = {
    "groups of int4": ("weight-only", qc.INT4_GROUP),
    "groups of int8": ("weight-only", qc.INT8_WEIGHT_ONLY.but(granularity=GROUPS)),
}


def layer(bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=bias), nn.ReLU())


def quantized(model: nn.Module, x: Tensor, mode: str, spec: qc.QuantSpec | None) -> Any:
    config = None if spec is None else qc.QuantConfig().set_all(spec)
    return without_data(model, x, mode=mode, config=config)


FAST = ("dynamic", "int8 weights")
CASES = [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in NATIVE]


@pytest.mark.parametrize("case", CASES)
def test_linear_layers_in_the_delegate(case: str) -> None:
    x = torch.randn(5, 64)
    program = quantized(layer(), x, *NATIVE[case])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = qc.lower(program, "executorch")
    assert lowered.delegation().fraction == 1
    assert lowered.delegation().others == ()
    assert relative(program(x), lowered(x)) < NEAR


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS)
def test_other_groups_are_brought_back_to_float_as_it_runs(case: str) -> None:
    x = torch.randn(2, 3, 64)
    program = quantized(layer(), x, *OTHERS[case])
    lowered = qc.lower(program, "executorch")
    (row,) = lowered.delegation().fallen_back
    assert row.place is RunsOn.PORTABLE
    assert "a scale for each channel" in row.why
    assert relative(program(x), lowered(x)) < NEAR
    assert len(lowered.content) < 0.9 * 64 * 48 * 4  # levels are stored, and not floats


@pytest.mark.slow
def test_scales_of_groups_that_the_delegate_would_round_are_named() -> None:
    x = torch.randn(5, 64)
    program = quantized(layer(), x, "dynamic", qc.INT4_GROUP_SYMMETRIC.but(timing="static"))
    with pytest.warns(UserWarning, match=r"bfloat16.*scale_bits=8"):
        lowered = qc.lower(program, "executorch")
    assert sqnr(program(x), lowered(x)) > 40


@pytest.mark.slow
def test_a_convolution_with_a_quantized_weight_alone_is_float_in_the_delegate() -> None:
    x = torch.randn(2, 3, 8, 8)
    program = without_data(nn.Conv2d(3, 8, 3), x, mode="weight-only")
    lowered = qc.lower(program, "executorch")
    assert [row.place for row in lowered.delegation().rows] == [RunsOn.DELEGATE_FLOAT]
    assert relative(program(x), lowered(x)) < NEAR


@pytest.mark.slow
def test_one_run_time_scale_for_several_rows_is_named() -> None:
    x = torch.randn(5, 64)
    program = quantized(layer(), x, "dynamic", qc.INT8_DYNAMIC)
    with pytest.warns(UserWarning, match="a scale for each row"):
        lowered = qc.lower(program, "executorch")
    exact = layer()(x)
    assert sqnr(exact, lowered(x)) > sqnr(exact, program(x)) - 1


def test_an_embedding_is_looked_up_in_int8() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(100, 16), nn.Linear(16, 4)

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.table(ids))

    ids = torch.randint(0, 100, (2, 6))
    config = qc.QuantConfig().set_op("embedding", qc.INT8_WEIGHT_ONLY)
    program = without_data(Words(), ids, mode="dynamic", config=config)
    lowered = qc.lower(program, "executorch")
    row = lowered.delegation().row("embedding")
    assert row is not None
    assert row.place is RunsOn.KERNEL
    # what is looked up lies on a grid: halfway between two levels of the next one it may go to either
    assert relative(program(ids), lowered(ids)) < 2 / 127


# -- recurrent layers ----------------------------------------------------------------------------------------------

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
