"""ONNX writers of recurrent layers, one node for each layer, and of cells, by their formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quantc as qc
from quantc.targets.onnx.dtypes import INT8
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.op_writers import NoOnnxFormError
from quantc.targets.onnx.profiles import PROFILES
from tests.support.onnx_models import close, initializers, ops, quantized, seeded
from tests.support.onnx_ops import check, drawn, program_of

LAYERS: dict[str, Any] = {
    "lstm": lambda **options: nn.LSTM(5, 3, **options),
    "gru": lambda **options: nn.GRU(5, 3, **options),
    "tanh": lambda **options: nn.RNN(5, 3, **options),
    "relu": lambda **options: nn.RNN(5, 3, nonlinearity="relu", **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "two layers, both ways": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False, "num_layers": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_yields_the_steps_and_the_last_states_of_torch(name: str, options: str) -> None:
    layer = seeded(lambda: LAYERS[name](**OPTIONS[options])).eval()
    x = drawn(4, 2, 5)
    check(layer, program_of(layer, x), x)


class Started(nn.Module):
    """A layer that begins with states of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.layer(x, (h, h.flip(0) * 2) if isinstance(self.layer, nn.LSTM) else h)


@pytest.mark.parametrize("name", LAYERS)
def test_states_to_begin_with_are_given_to_their_layers(name: str) -> None:
    model = Started(seeded(lambda: LAYERS[name](num_layers=2, bidirectional=True))).eval()
    inputs = drawn(3, 2, 5), drawn(4, 2, 3, seed=1)
    check(model, program_of(model, *inputs), *inputs)


class Cell(nn.Module):
    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor, h: Tensor) -> Any:
        return self.cell(x, (h, h * 2) if isinstance(self.cell, nn.LSTMCell) else h)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        nn.LSTMCell,
        nn.GRUCell,
        nn.RNNCell,
        lambda given, hidden, bias: nn.RNNCell(given, hidden, bias, nonlinearity="relu"),
    ],
    ids=["lstm", "gru", "tanh", "relu"],
)
def test_a_cell_is_that_of_torch(make: Any, bias: bool) -> None:
    model = Cell(seeded(lambda: make(5, 3, bias=bias))).eval()
    inputs = drawn(2, 5), drawn(2, 3, seed=1)
    check(model, program_of(model, *inputs), *inputs)


def test_each_layer_is_one_node() -> None:
    layer = seeded(lambda: nn.LSTM(5, 3, num_layers=3, bidirectional=True)).eval()
    model = export(program_of(layer, drawn(4, 2, 5)), PROFILES["onnxruntime"]).model
    assert [node.op_type for node in model.graph.node].count("LSTM") == 3


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_weights_stay_int8_with_their_gates_in_the_order_of_onnx(name: str) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = LAYERS[name](batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.layer(x)[0]

    x = drawn(2, 4, 5)
    made = quantized(seeded(Last), [(x,)])
    model = qc.lower(made, "onnx")
    assert [kind for given, kind in initializers(model).items() if given.endswith("_ordered")].count(INT8) == 2
    assert ops(model).count(name.upper()) == 1
    assert close(made(x), model(x)) > 100


def test_a_projection_is_refused() -> None:
    projected = seeded(lambda: nn.LSTM(5, 4, proj_size=2)).eval()
    with pytest.raises(NoOnnxFormError, match="projection"):
        export(program_of(projected, drawn(4, 2, 5)), PROFILES["onnxruntime"])


class Called(nn.Module):
    """The op behind a layer, with settings of its own."""

    def __init__(self, dropout: float, train: bool) -> None:
        super().__init__()
        self.layer, self.settings = seeded(lambda: nn.GRU(5, 3, num_layers=2)), (dropout, train)

    def forward(self, x: Tensor, h: Tensor) -> Any:
        params: Any = self.layer.all_weights
        return torch.gru(x, h, [*params[0], *params[1]], True, 2, *self.settings, False, False)


def test_dropout_is_refused_where_it_drops_anything() -> None:
    inputs = drawn(4, 2, 5), drawn(2, 2, 3)
    with pytest.raises(NoOnnxFormError, match="drops values"):
        export(program_of(Called(0.5, True), *inputs), PROFILES["onnxruntime"])
    for settings in ((0.5, False), (0.0, True)):
        check(Called(*settings), program_of(Called(*settings), *inputs), *inputs)
