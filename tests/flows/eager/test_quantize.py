"""Whole models in one call of `quantize_dynamic`: recurrent layers, transformers, attention; and beside static layers."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quantc.errors import InputError
from quantc.flows import eager
from quantc.nn import DYNAMIC_MODULES
from quantc.nn.quantized.dynamic import MultiheadAttention
from tests.support.seed_eager_items import size_of, torch_flow

TOLERANCE = {torch.qint8: 0.03, torch.float16: 1e-3}


class Tagger(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.cells = kind(16, 32, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cells(x)[0])


def encoder(batch_first: bool = True, norm_first: bool = False) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "lstm": (lambda: Tagger(nn.LSTM), ((2, 6, 16),)),
    "gru": (lambda: Tagger(nn.GRU), ((2, 6, 16),)),
    "rnn": (lambda: Tagger(nn.RNN), ((2, 6, 16),)),
    "cells": (lambda: nn.Sequential(nn.GRUCell(8, 16), nn.RNNCell(16, 8), nn.Linear(8, 4)), ((3, 8),)),
    "encoder": (encoder, ((2, 5, 32),)),
    "encoder, places first": (lambda: encoder(False), ((5, 2, 32),)),
    "encoder, norms first": (lambda: encoder(norm_first=True), ((2, 5, 32),)),
    "transformer": (lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True), ((2, 5, 32), (2, 4, 32))),
}


def made(name: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    build, shapes = MODELS[name]
    return build().eval(), [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_model_in_one_call(name: str, dtype: torch.dtype) -> None:
    model, inputs = made(name)
    quantized = eager.quantize_dynamic(model, dtype=dtype)
    left = [path for path, module in quantized.named_modules() if type(module) in DYNAMIC_MODULES]
    assert left == [], "every layer that has a dynamic form is quantized"
    for mode in (torch.no_grad, torch.enable_grad):  # torch's own fast path is for the first alone
        with mode():
            expected, found = model(*inputs), quantized(*inputs)
        assert 0 < float((found - expected).abs().max()) <= TOLERANCE[dtype] * float(expected.abs().max())


def test_an_encoder_with_padding_has_no_fast_path_either() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    x = torch.randn(2, 5, 32)
    for chosen in (None, {nn.Linear}, {nn.MultiheadAttention}):
        quantized = eager.quantize_dynamic(model, chosen)
        with torch.no_grad():
            expected, found = (each(x, src_key_padding_mask=padding) for each in (model, quantized))
        assert 0 < float((found - expected)[~padding].abs().max()) < 0.1


@pytest.mark.parametrize("name", ["lstm", "gru", "cells"])
def test_results_are_torchs(name: str) -> None:
    model, inputs = made(name)
    for dtype in TOLERANCE:
        ours, theirs = (flow.quantize_dynamic(model, dtype=dtype)(*inputs) for flow in (eager, torch_flow))
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("dtype", "share"), [(torch.qint8, 0.27), (torch.float16, 0.52)], ids=str)
def test_the_file_of_a_transformer_takes_a_quarter(dtype: torch.dtype, share: float) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 2).eval()
    assert size_of(eager.quantize_dynamic(model, dtype=dtype).state_dict()) <= share * size_of(model.state_dict())


# -- attention ---------------------------------------------------------------------------------------------------------

EXACT = eager.QConfig(
    eager.PlaceholderObserver.with_args(dtype=torch.float16, is_dynamic=True),
    eager.PlaceholderObserver.with_args(dtype=torch.float16),
)


def attention(**settings: Any) -> tuple[nn.MultiheadAttention, Any]:
    """One with weights that halves hold exactly, and its quantized form."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 4, **settings).eval()
    for parameter in plain.parameters():
        parameter.data = torch.round(torch.randn_like(parameter) * 16) / 64
    vars(plain)["qconfig"] = EXACT
    return plain, MultiheadAttention.from_float(plain)


def masks(kind: str, heads: int, batch: int, rows: int, places: int) -> dict[str, Tensor]:
    causal = torch.ones(rows, places, dtype=torch.bool).triu(1)
    padding = torch.zeros(batch, places, dtype=torch.bool)
    padding[-1, -2:] = True
    return {
        "none": {},
        "rows": {"attn_mask": causal},
        "numbers": {"attn_mask": torch.randn(rows, places)},
        "heads": {"attn_mask": causal.expand(batch * heads, rows, places)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
    }[kind]


CHOICES = list(itertools.product(["none", "rows", "numbers", "heads", "padding", "both"], [True, False], [True, False]))


@pytest.mark.parametrize(("kind", "batch_first", "need_weights"), CHOICES)
def test_attention_is_torchs(kind: str, batch_first: bool, need_weights: bool) -> None:
    plain, quantized = attention(batch_first=batch_first)
    query, other = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    query, other = (query, other) if batch_first else (query.transpose(0, 1), other.transpose(0, 1))
    given: dict[str, Any] = {"need_weights": need_weights, **masks(kind, 4, 2, 5, 6)}
    expected, weights = plain(query, other, other, **given)
    found, shown = quantized(query, other, other, **given)
    assert torch.allclose(found, expected, atol=1e-5)
    assert (shown is None) == (weights is None)
    if need_weights:
        assert torch.allclose(shown, weights, atol=1e-6)


@pytest.mark.parametrize("settings", [{"bias": False}, {"kdim": 8, "vdim": 12}])
def test_attention_of_other_widths_and_without_biases(settings: dict[str, Any]) -> None:
    plain, quantized = attention(**settings)
    query, key, value = (torch.randn(5, settings.get(name, 16)) for name in ("", "kdim", "vdim"))
    expected, weights = plain(query, key, value, average_attn_weights=False)
    found, shown = quantized(query, key, value, average_attn_weights=False)
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(shown, weights, atol=1e-6)


def test_attention_is_saved_and_loaded() -> None:
    _, quantized = attention()
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    fresh = MultiheadAttention(16, 4, dtype=torch.float16)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    x = torch.randn(3, 2, 16)
    assert torch.equal(fresh(x, x, x)[0], quantized(x, x, x)[0])


def test_what_attention_cannot_do_is_refused() -> None:
    _, quantized = attention()
    x = torch.randn(3, 2, 16)
    with pytest.raises(InputError, match="is_causal"):
        quantized(x, x, x, is_causal=True)
    with pytest.raises(Exception, match="add_bias_kv") as caught:
        attention(add_bias_kv=True)
    assert "None" in str(caught.value)


# -- beside static layers ----------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A static layer between stubs, and a recurrent one behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.quant, self.conv, self.dequant = eager.QuantStub(), nn.Conv1d(8, 16, 3), eager.DeQuantStub()
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        seen = self.dequant(self.conv(self.quant(x))).transpose(1, 2)
        return self.head(self.lstm(seen)[0])


def test_static_and_dynamic_layers_in_one_model() -> None:
    model: Any = Mixed().eval()
    model.qconfig = eager.get_default_qconfig("fbgemm")
    model.lstm.qconfig = model.head.qconfig = eager.default_dynamic_qconfig
    prepared, x = eager.prepare(model), torch.randn(2, 8, 12)
    prepared(x)
    converted: Any = eager.convert(prepared)
    assert type(converted.lstm) is DYNAMIC_MODULES[nn.LSTM]
    assert type(converted.head) is DYNAMIC_MODULES[nn.Linear]
    assert (converted(x) - model(x)).abs().max() < 0.05


def test_recurrent_layers_other_than_lstms_have_no_static_form() -> None:
    model: Any = Mixed().eval()
    model.lstm = nn.GRU(model.lstm.input_size, model.lstm.hidden_size, batch_first=True).eval()
    model.qconfig = eager.get_default_qconfig("fbgemm")
    with pytest.raises(eager.NoStaticFormError) as caught:
        eager.prepare(model)
    assert caught.value.where == "lstm"
    assert "default_dynamic_qconfig" in str(caught.value.advice)


class Words(nn.Module):
    """A table of embeddings before a static part."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rest = nn.EmbeddingBag(50, 16, mode="sum"), eager.QuantWrapper(nn.Linear(16, 4))

    def forward(self, ids: Tensor) -> Any:
        return self.rest(self.table(ids))


def test_tables_are_quantized_beside_static_layers() -> None:
    model, ids = Words().eval(), torch.randint(0, 50, (4, 6))
    vars(model)["qconfig"] = eager.get_default_qconfig("fbgemm")
    prepared = eager.prepare(model)
    prepared(ids)
    with pytest.raises(eager.SwapError) as caught:  # the config of the whole model is not one for tables
        eager.convert(prepared)
    assert caught.value.where == "table"
    vars(model.table)["qconfig"] = eager.float_qparams_weight_only_qconfig
    prepared = eager.prepare(model)
    prepared(ids)
    converted: Any = eager.convert(prepared)
    assert type(converted.table) is DYNAMIC_MODULES[nn.EmbeddingBag]
    assert (converted(ids) - model(ids)).abs().max() < 0.1


class Scaled(nn.Module):
    """A layer that only its author can quantize."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Any) -> Any:
        return x * self.factor


class ObservedScaled(Scaled):
    @classmethod
    def from_float(cls, mod: Scaled) -> ObservedScaled:
        return cls(mod.factor)


class QuantizedScaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, q: Any) -> Any:
        return type(q)(q.data_of, q.q_scale() * self.factor, q.q_zero_point())

    @classmethod
    def from_observed(cls, mod: ObservedScaled) -> QuantizedScaled:
        return cls(mod.factor)


def test_layers_of_users_own() -> None:
    model = eager.QuantWrapper(nn.Sequential(nn.Linear(8, 8), Scaled(0.5)).eval())
    vars(model)["qconfig"] = eager.get_default_qconfig("fbgemm")
    to_observed = {"float_to_observed_custom_module_class": {Scaled: ObservedScaled}}
    to_quantized = {"observed_to_quantized_custom_module_class": {ObservedScaled: QuantizedScaled}}
    prepared, x = eager.prepare(model, prepare_custom_config_dict=to_observed), torch.randn(4, 8)
    assert type(prepared.get_submodule("module.1")) is ObservedScaled
    prepared(x)
    with pytest.raises(eager.MissingStubError) as caught:  # without the second table it is a float layer in between
        eager.convert(prepared)
    assert "module.1" in str(caught.value.where)
    converted = eager.convert(prepared, convert_custom_config_dict=to_quantized)
    assert type(converted.get_submodule("module.1")) is QuantizedScaled
    assert (converted(x) - model(x)).abs().max() < 0.05


# -- what is quantized unless told, and the other verbs in one call ---------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "swapped"),
    [
        (torch.qint8, {"fc", "cells"}),
        (torch.float16, {"fc", "cells"}),
        (torch.quint8, {"bag", "table"}),
        (torch.quint4x2, {"bag"}),
    ],
)
def test_the_dtype_says_which_layers_are_quantized(dtype: torch.dtype, swapped: set[str]) -> None:
    model = nn.ModuleDict(
        {
            "fc": nn.Linear(8, 8),
            "cells": nn.GRU(8, 8),
            "bag": nn.EmbeddingBag(4, 8),
            "table": nn.Embedding(4, 8),
            "conv": nn.Conv1d(2, 2, 1),
        }
    )
    found = eager.quantize_dynamic(model, dtype=dtype)
    assert {name for name, part in found.named_children() if type(part) is not type(model[name])} == swapped
    assert not found.training
    assert not any(hasattr(part, "qconfig") for part in found.modules())


def test_a_dtype_that_no_layer_has_is_refused_unless_qconfigs_are_given() -> None:
    with pytest.raises(ValueError, match="int32") as caught:
        eager.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), dtype=torch.qint32)
    assert "qint8" in str(caught.value)
    given = {nn.Linear: eager.default_dynamic_qconfig}
    assert DYNAMIC_MODULES[nn.Linear] is type(
        eager.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), given, torch.qint32).get_submodule("0")
    )


def test_static_quantization_in_one_call_is_that_of_its_steps() -> None:
    torch.manual_seed(0)
    model = eager.QuantWrapper(nn.Sequential(nn.Linear(4, 4)))
    vars(model)["qconfig"] = eager.get_default_qconfig("fbgemm")
    data = [(torch.randn(3, 4), None) for _ in range(2)]
    quantized = eager.quantize(model, eager.default_eval_fn, [data])
    prepared = eager.prepare(model.eval())
    eager.default_eval_fn(prepared, data)
    assert torch.equal(quantized(data[0][0]), eager.convert(prepared)(data[0][0]))
    assert type(model.get_submodule("module.0")) is nn.Linear


def test_training_in_one_call_is_that_of_its_steps() -> None:
    torch.manual_seed(0)
    model = eager.QuantWrapper(nn.Sequential(nn.Linear(4, 4)))
    vars(model)["qconfig"] = eager.get_default_qat_qconfig("onednn")
    x = torch.randn(3, 4)
    modes: list[bool] = []

    def run(learning: nn.Module, batch: Tensor) -> None:
        modes.append(learning.training)
        learning(batch)

    quantized = eager.quantize_qat(model, run, [x])
    learning = eager.prepare_qat(model.train())
    learning(x)
    assert modes == [True]
    assert torch.equal(quantized(x), eager.convert(learning.eval())(x))
