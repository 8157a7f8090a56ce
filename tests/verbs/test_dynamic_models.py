"""Whole models in one call and without data, beside torch's own dynamic quantization of the same layers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.annotate.quantizer import mode_config, quantizer_of
from quantc.config.config import QuantConfig
from quantc.errors import AnnotationError
from quantc.ir.decisions import FLOAT
from quantc.spec.spec import INT8_WEIGHT_ONLY, QuantSpec
from tests.support import fake_quantized as fake
from tests.support.encoders import TextEncoder, ViT, initialise
from tests.support.sequence_architectures import DLRM, GPT, T5, Llama

MODE = mode_config(quantizer_of("x86"), "dynamic")
SPEC: QuantSpec = MODE.rules[0].use.spec  # type: ignore[union-attr]
TOKEN = QuantConfig().set_all(SPEC.but(granularity="per-token"))
LAYERS = {nn.Linear, nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell, nn.RNNCell}
"""What torch.ao quantizes dynamically; quantc adds nn.RNN, and products with constants."""


pytestmark = pytest.mark.usefixtures("no_grad")


class Sequence(nn.Module):
    """Words, two recurrent layers, and a layer on top."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.body = kind(width, width, 2, batch_first=True)
        self.top = nn.Linear(width, 50)

    def forward(self, x: Tensor) -> Any:
        return self.top(self.body(self.words(x))[0])


class Cells(nn.Module):
    """Every kind of cell, unrolled."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.lstm, self.gru = nn.LSTMCell(width, width), nn.GRUCell(width, width)
        self.rnn, self.top = nn.RNNCell(width, width), nn.Linear(width, 50)

    def forward(self, x: Tensor) -> Any:
        h = c = g = r = torch.zeros(x.shape[0], self.lstm.hidden_size)
        for step in range(x.shape[1]):
            h, c = self.lstm(self.words(x[:, step]), (h, c))
            g = self.gru(h, g)
            r = self.rnn(g, r)
        return self.top(r)


class Attending(nn.Module):
    """torch's own attention and encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x + self.attention(x, x, x, need_weights=False)[0])


def normal(model: nn.Module, seed: int) -> nn.Module:
    """Weights as training leaves them: bell-shaped, and wider in some channels than in others."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "words" not in name:
            width = parameter[0].numel() ** -0.5
            spread = 0.5 + torch.rand(parameter.shape[0], *[1] * (parameter.dim() - 1), generator=generator)
            parameter.data = torch.randn(parameter.shape, generator=generator) * width * spread
    return model.eval()


class Case(NamedTuple):
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]


def words(batch: int, length: int, count: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(0, count, (batch, length), generator=torch.Generator().manual_seed(7)),)


CASES = (
    Case("bert", lambda: initialise(TextEncoder(128, 4, 3, 32, 500)), words(16, 32, 500)),
    Case("vit", lambda: initialise(ViT(96, 3, 4, 64, 16)), lambda: (torch.randn(48, 3, 64, 64),)),
    Case("lstm", lambda: normal(Sequence(nn.LSTM), 1), words(32, 12, 50)),
    Case("gru", lambda: normal(Sequence(nn.GRU), 2), words(32, 12, 50)),
    Case("cells", lambda: normal(Cells(), 3), words(48, 6, 50)),
    Case("t5", lambda: normal(T5(), 4), words(16, 12, 64)),
    Case("gpt", lambda: normal(GPT(), 5), words(16, 12, 96)),
    Case("llama", lambda: normal(Llama(), 6), words(16, 12, 96)),
)
BIG = (
    Case("bert-6x768", lambda: initialise(TextEncoder()), words(2, 128, 30522)),
    Case("vit-tiny", lambda: initialise(ViT()), lambda: (torch.randn(4, 3, 224, 224),)),
    Case("lstm-512", lambda: normal(Sequence(nn.LSTM, 512), 7), words(16, 32, 50)),
)


def sqnr(reference: Any, given: Any) -> float:
    pairs = list(zip(pytree.tree_leaves(reference), pytree.tree_leaves(given), strict=True))
    signal = sum(float((a.double() ** 2).sum()) for a, _ in pairs)
    noise = sum(float(((a.double() - b.double()) ** 2).sum()) for a, b in pairs)
    return float("inf") if noise == 0 else float(10 * torch.log10(torch.tensor(signal / noise)))


def by_torch(model: nn.Module) -> nn.Module:
    """The model with the same layers quantized by torch.ao."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), LAYERS)  # type: ignore[no-untyped-call]
    return made


def compared(case: Case) -> tuple[float, float, float]:
    """The SQNR of torch.ao, of the mode, and of the mode by token."""
    torch.manual_seed(0)
    model, inputs = case.build(), case.inputs()
    right = model(*inputs)
    captured = qc.capture(model, inputs)
    plain, by_token = (qc.convert(qc.prepare(captured, "x86", config=config)) for config in (MODE, TOKEN))
    return sqnr(right, by_torch(model)(*inputs)), sqnr(right, plain(*inputs)), sqnr(right, by_token(*inputs))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_loses_less_than_with_torch_and_least_by_token(case: Case) -> None:
    theirs, ours, by_token = compared(case)
    assert ours >= theirs
    assert by_token >= ours


@pytest.mark.slow
@pytest.mark.parametrize("case", BIG, ids=lambda case: case.name)
def test_a_model_of_full_size_loses_less_than_with_torch(case: Case) -> None:
    theirs, ours, by_token = compared(case)
    assert ours >= theirs
    assert by_token >= ours


# -- one call ----------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    """Words, bags of words, recurrent layers, cells, a convolution, attention, and layers that share their input."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(50, width), nn.EmbeddingBag(50, width, mode="sum")
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.gru, self.rnn = nn.GRU(2 * width, width, batch_first=True), nn.RNN(width, width, batch_first=True)
        self.cell = nn.LSTMCell(width, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.top = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Any:
        y = self.rnn(self.gru(self.lstm(self.words(x))[0])[0])[0]
        y = self.conv(y.transpose(1, 2)).transpose(1, 2)
        y = y + self.attention(y, y, y, need_weights=False)[0]
        h, _ = self.cell(y[:, -1] + self.bag(x))
        return self.top(h)


DYNAMIC_OPS = {"lstm", "gru", "rnn_tanh", "lstm_cell", "linear"}


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
def test_one_call_takes_a_model_of_everything_and_says_what_became_of_it(backend: str) -> None:
    torch.manual_seed(0)
    model, (x,) = normal(Everything(), 8), words(8, 10, 50)()
    result = qc.quantize(model, (x,), backend=backend, mode="dynamic")
    rows = {row.node: row for row in result.report.coverage.rows}
    assert {row.op for row in rows.values() if row.technique == "dynamic"} == DYNAMIC_OPS
    assert not [row for row in rows.values() if row.technique in ("static", "weight-only")]
    assert all(row.reason for row in rows.values())
    lookups = [row for row in rows.values() if row.op.startswith("embedding")]
    assert len(lookups) == 2
    assert all("reads no activation" in row.reason for row in lookups)
    (conv,) = [row for row in rows.values() if row.op == "conv1d"]
    assert "only where the config names the op" in conv.reason
    assert result.report.calibration is None
    assert sqnr(model(x), result(x)) > 25
    stored = {str(tensor.dtype) for tensor in result.program.module.state_dict().values()}
    assert "torch.int8" in stored


def test_what_the_mode_leaves_out_can_be_asked_for() -> None:
    torch.manual_seed(0)
    model, (x,) = normal(Everything(), 8), words(8, 10, 50)()
    config = (
        QuantConfig()
        .set(nn.Embedding, INT8_WEIGHT_ONLY)
        .set(nn.EmbeddingBag, INT8_WEIGHT_ONLY)
        .set(nn.Conv1d, SPEC)
        .set_op("matmul", SPEC)
    )
    result = qc.quantize(model, (x,), mode="dynamic", config=config)
    rows = {row.op: row.technique for row in result.report.coverage.rows}
    assert rows["embedding"] == rows["embedding_bag"] == "weight-only"
    assert rows["conv1d"] == rows["matmul"] == rows["linear"] == "dynamic"
    assert sqnr(model(x), result(x)) > 25
    assert result.report.size.after < 0.45 * result.report.size.before


def test_convolutions_of_a_mode_are_left_float_and_a_model_of_nothing_else_is_refused() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 8, 8)
    with pytest.raises(AnnotationError, match="nothing was quantized") as caught:
        qc.quantize(model, (x,), mode="dynamic")
    assert "names the op, the node or the layer" in str(caught.value.where)
    by_layer = qc.quantize(model, (x,), config=QuantConfig().set("0", SPEC))
    by_class = qc.quantize(model, (x,), config=QuantConfig().set(nn.Conv2d, SPEC))
    conv = model[0]
    assert isinstance(conv, nn.Conv2d)
    y = fake.as_it_comes(x, qmax=127, eps=2.0**-14)
    right = torch.relu(torch.conv2d(y, fake.weight_by_channel(conv.weight), conv.bias))
    assert torch.equal(by_layer(x), right)
    assert torch.equal(by_class(x), right)


def test_attention_of_torch_is_taken_whole() -> None:
    """torch.ao leaves nn.MultiheadAttention float: its parts are no layers that can be swapped."""
    torch.manual_seed(0)
    model, x = normal(Attending(), 9), torch.randn(16, 12, 64)
    captured = qc.capture(model, (x,))
    plain, by_token = (qc.convert(qc.prepare(captured, "x86", config=config)) for config in (MODE, TOKEN))
    rows = [row for row in plain.coverage().rows if row.op == "linear"]
    assert rows
    assert all(row.technique == "dynamic" for row in rows)
    assert 25 < sqnr(model(x), plain(x)) <= sqnr(model(x), by_token(x))


def test_bags_are_stored_in_bytes_and_lose_little() -> None:
    torch.manual_seed(0)
    model = DLRM().eval()
    inputs = (torch.randn(64, 13), torch.randint(0, 50, (64, 4, 3)))
    config = QuantConfig().set_all(FLOAT).set(nn.EmbeddingBag, INT8_WEIGHT_ONLY.but(qmin=-127))
    result = qc.quantize(model, inputs, config=config)
    by_hand = copy.deepcopy(model)
    for bag in by_hand.bags:
        assert isinstance(bag, nn.EmbeddingBag)
        bag.weight = nn.Parameter(fake.weight_by_channel(bag.weight))
    assert torch.equal(result(*inputs), by_hand(*inputs))


# -- recurrent layers, bit for bit --------------------------------------------------------------------------------


class Fed(nn.Module):
    """A recurrent layer or cell, whose input is quantized by hand."""

    def __init__(self, layer: nn.Module, by_token: bool) -> None:
        super().__init__()
        self.layer = copy.deepcopy(layer)
        self.by_token = by_token
        for _, parameter in self.layer.named_parameters():
            if parameter.dim() == 2:
                parameter.data = fake.weight_by_channel(parameter)

    def forward(self, x: Tensor) -> Any:
        find = fake.by_token if self.by_token else fake.as_it_comes
        return self.layer(find(x, qmax=127, eps=2.0**-14))


RECURRENT: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.LSTM(12, 16, 2, batch_first=True, bidirectional=True), (4, 7, 12)),
    (nn.LSTM(12, 16, proj_size=8), (7, 4, 12)),
    (nn.GRU(12, 16, 2), (7, 4, 12)),
    (nn.RNN(12, 16, nonlinearity="relu"), (7, 4, 12)),
    (nn.LSTMCell(12, 16), (4, 12)),
    (nn.GRUCell(12, 16, bias=False), (4, 12)),
    (nn.RNNCell(12, 16), (4, 12)),
]


@pytest.mark.parametrize("config", [MODE, TOKEN], ids=["tensor", "token"])
@pytest.mark.parametrize(("layer", "shape"), RECURRENT, ids=lambda part: type(part).__name__)
def test_a_recurrent_layer_computes_on_what_its_input_and_weights_stand_for(
    layer: nn.Module, shape: tuple[int, ...], config: QuantConfig
) -> None:
    """In the Q/DQ form the state stays float, and everything else is as written by hand."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(2))
    program = qc.convert(qc.prepare(qc.capture(layer.eval(), (x,)), "x86", config=config))
    by_hand = Fed(layer.eval(), config is TOKEN)
    for found, right in zip(pytree.tree_leaves(program(x)), pytree.tree_leaves(by_hand(x)), strict=True):
        assert torch.equal(found, right)
