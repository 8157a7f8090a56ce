"""Behaviours of static LSTMs, attention and tables of embeddings in the eager flow, one test for each."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import QuantcError, SpecError
from quantc.flows import eager
from quantc.nn import QuantizedTensor, quantizable, quantized, torch_state_dict
from quantc.nn.quantized import dynamic
from tests.support.eager_small import converted
from tests.support.oracles import sqnr

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))

# -- LSTMs and attention -------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.quant, self.lstm = eager.QuantStub(), nn.LSTM(8, 12, **keywords)
        self.dequant = nn.ModuleList(eager.DeQuantStub() for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        y, (h, c) = self.lstm(self.quant(x))
        return tuple(stub(part) for stub, part in zip(self.dequant, (y, h, c), strict=True))


KINDS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "bidirectional": True},
]


def torchs_lstm(model: nn.Module, x: Tensor) -> Any:
    """The same model through torch's own quantizable modules."""
    import torch.ao.quantization as ao

    theirs: Any = copy.deepcopy(model)
    theirs.quant = ao.QuantStub()
    theirs.dequant = nn.ModuleList(ao.DeQuantStub() for _ in range(3))
    theirs.qconfig = ao.get_default_qconfig("fbgemm")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = ao.prepare(theirs)  # type: ignore[no-untyped-call]
        prepared(x)
        return ao.convert(prepared)(x)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("keywords", KINDS, ids=str)
def test_static_lstms(keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    torch.backends.quantized.engine = "fbgemm"
    model, x = Recurrent(**keywords).eval(), torch.randn(6, 3, 8)
    with torch.no_grad():
        observed = quantizable.LSTM.from_float(model.lstm)
        torch.testing.assert_close(observed(x), model.lstm(x))
        made = converted(model, x)
        assert type(made.lstm) is quantized.LSTM
        wanted, found, theirs = model(x), made(x), torchs_lstm(model, x)
        for ours, other, exact in zip(found, theirs, wanted, strict=True):
            assert ours.shape == exact.shape
            assert sqnr(exact, ours) > max(20, sqnr(exact, other) - 3)
    again = converted(Recurrent(**keywords), x)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(x)[0], found[0])


def test_static_lstms_of_one_sequence_and_from_a_state() -> None:
    torch.manual_seed(0)
    layer, x = nn.LSTM(8, 12, 2).eval(), torch.randn(6, 8)
    observed = quantizable.LSTM.from_float(layer)
    state = (torch.randn(2, 12), torch.randn(2, 12))
    torch.testing.assert_close(observed(x, state), layer(x, state))
    with pytest.raises(SpecError, match="project"):
        quantizable.LSTM.from_float(nn.LSTM(4, 8, proj_size=2))
    cell = nn.LSTMCell(8, 12)
    torch.testing.assert_close(quantizable.LSTMCell.from_float(cell)(x), cell(x))
    with pytest.raises(QuantcError, match="observed first"):
        quantized.LSTM.from_float(layer)
    with pytest.raises(QuantcError, match="was given LSTM"):
        quantized.LSTM.from_observed(layer)


def test_an_lstm_with_a_dynamic_config_is_dynamic_still() -> None:
    model = Recurrent().eval()
    vars(model)["qconfig"] = None
    vars(model.lstm)["qconfig"] = eager.default_dynamic_qconfig
    made: Any = eager.convert(eager.prepare(model, accept="no-effect"), accept="no-data")
    assert type(made.lstm) is dynamic.LSTM


class Attending(nn.Module):
    def __init__(self, **keywords: Any) -> None:
        super().__init__()
        self.quant, self.attention = eager.QuantStub(), nn.MultiheadAttention(16, 4, **keywords)
        self.dequant = nn.ModuleList(eager.DeQuantStub() for _ in range(2))

    def forward(self, x: Tensor, **keywords: Any) -> Any:
        q = self.quant(x)
        y, weights = self.attention(q, q, q, **keywords)
        return self.dequant[0](y), None if weights is None else self.dequant[1](weights)


@pytest.mark.parametrize("keywords", [{}, {"batch_first": True}, {"bias": False}], ids=str)
def test_static_attention(keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Attending(**keywords).eval(), torch.randn(5, 3, 16)
    with torch.no_grad():
        observed = quantizable.MultiheadAttention.from_float(model.attention)
        torch.testing.assert_close(observed(x, x, x), model.attention(x, x, x))
        made = converted(model, x)
        assert type(made.attention) is quantized.MultiheadAttention
        assert type(made.attention.linear_Q) is quantized.Linear
        for ours, exact in zip(made(x), model(x), strict=True):
            assert sqnr(exact, ours) > 22
        mask = torch.ones(made(x)[1].shape[-2:]).triu(1).bool()
        masked = [side(x, attn_mask=mask, need_weights=False)[0] for side in (model, made)]
        assert sqnr(*masked) > 15  # calibrated without a mask


# -- tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.quint8, torch.quint4x2])
@pytest.mark.parametrize("width", [12, 13])
def test_tables_of_8_and_4_bits(dtype: torch.dtype, width: int) -> None:
    """Those of 4 bits take half the bytes, and look up the same numbers as one level to a byte would."""
    torch.manual_seed(0)
    qconfig = eager.float_qparams_weight_only_qconfig
    if dtype is torch.quint4x2:
        qconfig = eager.float_qparams_weight_only_qconfig_4bit
    indices = torch.randint(10, (16,))
    table: Any = nn.Embedding(10, width)
    table.qconfig = qconfig
    made = quantized.Embedding.from_float(table)
    stored = made.state_dict()["weight"]
    assert stored.numel() * stored.element_size() == 10 * (width if dtype is torch.quint8 else -(-width // 2))
    assert made.dtype is dtype
    assert str(dtype if dtype is torch.quint4x2 else torch.uint8) in repr(made)
    levels = made.weight().int_repr()
    assert levels.shape == (10, width)
    assert int(levels.max()) == (15 if dtype is torch.quint4x2 else 255)
    exact = made.weight().dequantize()[indices]
    torch.testing.assert_close(made(indices), exact, atol=1e-6, rtol=0)
    torch.testing.assert_close(made(indices.view(4, 4)), exact.view(4, 4, width), atol=1e-6, rtol=0)
    again = quantized.Embedding(10, width, dtype=dtype)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(indices), made(indices))


def test_tables_of_4_bits_go_to_torch_and_back() -> None:
    import torch.ao.nn.quantized as ao_quantized

    torch.manual_seed(0)
    table: Any = nn.EmbeddingBag(10, 12, mode="sum")
    table.qconfig = eager.float_qparams_weight_only_qconfig_4bit
    ours = quantized.EmbeddingBag.from_float(table)
    theirs: Any = ao_quantized.EmbeddingBag(10, 12, dtype=torch.quint4x2)
    theirs.load_state_dict(torch_state_dict(ours))
    indices, offsets = torch.randint(10, (16,)), torch.tensor([0, 4, 4, 9])
    assert theirs.weight().dtype is torch.quint4x2
    torch.testing.assert_close(theirs(indices, offsets), ours(indices, offsets), atol=0.02, rtol=0)
    back = quantized.EmbeddingBag(10, 12, dtype=torch.quint4x2)
    back.load_state_dict(theirs.state_dict())
    assert torch.equal(back.weight().int_repr(), ours.weight().int_repr())
    assert back.state_dict()["weight"].shape == (10, 6)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_4_bits(mode: str) -> None:
    torch.manual_seed(0)
    table: Any = nn.EmbeddingBag(10, 12, mode=mode)
    table.qconfig = eager.float_qparams_weight_only_qconfig_4bit
    made = quantized.EmbeddingBag.from_float(table)
    exact = nn.EmbeddingBag(10, 12, mode=mode, _weight=made.weight().dequantize())
    indices, offsets = torch.randint(10, (16,)), torch.tensor([0, 4, 4, 9])
    torch.testing.assert_close(made(indices, offsets), exact(indices, offsets), atol=1e-5, rtol=0)


def test_levels_that_4_bits_cannot_hold_are_refused() -> None:
    eight = QuantizedTensor(torch.full((3, 4), 16, dtype=torch.uint8), torch.ones(3), torch.zeros(3), 0)
    with pytest.raises(SpecError, match=r"0\.\.15"):
        quantized.Embedding(3, 4, _weight=eight, dtype=torch.quint4x2)
    with pytest.raises(SpecError, match="float16"):
        quantized.Embedding(3, 4, dtype=torch.float16)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.EmbeddingBag(10, 12, include_last_offset=True, mode="sum")
        self.fc = nn.Linear(5, 5)

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor, x: Tensor) -> Any:
        return self.emb(indices, offsets, weights), self.fc(x)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.quint4x2])
def test_a_table_alone_in_a_model(dtype: torch.dtype) -> None:
    observer = eager.PerChannelMinMaxObserver.with_args(
        dtype=dtype, qscheme=torch.per_channel_affine_float_qparams, ch_axis=0
    )
    model = Tables().eval()
    vars(model.emb)["qconfig"] = eager.QConfig(activation=eager.default_placeholder_observer, weight=observer)
    vars(model)["qconfig"] = None
    made: Any = eager.convert(eager.prepare(model))
    assert "QuantizedEmbeddingBag" in str(made)
    assert type(made.fc) is nn.Linear
    indices, offsets = torch.randint(10, (16,)), torch.tensor([0, 4, 9, 16])
    assert made(indices, offsets, torch.rand(16), X)[0].shape == (3, 12)
    tables = eager.quantize_dynamic(Tables().eval(), {"emb": vars(model.emb)["qconfig"]})
    assert type(tables.emb) is quantized.EmbeddingBag
