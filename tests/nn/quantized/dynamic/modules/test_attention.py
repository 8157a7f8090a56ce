"""Attention whose four projections have quantized weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import SpecError
from quantc.nn.quantized import dynamic


def pair(**settings: Any) -> tuple[dynamic.MultiheadAttention, nn.MultiheadAttention]:
    torch.manual_seed(0)
    source = nn.MultiheadAttention(16, 4, **settings).eval()
    return dynamic.MultiheadAttention.from_float(source), source


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"batch_first": True}, {"kdim": 5, "vdim": 7}])
def test_it_is_called_as_torchs_and_comes_close(settings: dict[str, Any]) -> None:
    ours, source = pair(**settings)
    query = torch.randn(3, 3, 16)
    key, value = (torch.randn(3, 3, width or 16) for width in (source.kdim, source.vdim))
    with torch.no_grad():
        (found, weights), (wanted, their_weights) = ours(query, key, value), source(query, key, value)
    assert weights is not None
    assert 0 < float((found - wanted).abs().max()) < 0.05
    assert float((weights - their_weights).abs().max()) < 0.05


def test_projections_are_stored_as_int8() -> None:
    ours, source = pair(bias=False)
    layers: dict[str, Any] = dict(ours.named_children())
    assert list(layers) == ["query", "key", "value", "out_proj"]
    wanted = dict(zip(layers, (*source.in_proj_weight.detach().chunk(3), source.out_proj.weight.detach()), strict=True))
    for name, layer in layers.items():
        assert layer.weight().dtype is torch.int8
        assert float((layer.weight().dequantize() - wanted[name]).abs().max()) <= layer.weight().q_scale() * 0.501


def test_state_dicts_are_loaded_into_new_ones() -> None:
    ours, _ = pair()
    other = dynamic.MultiheadAttention(16, 4)
    x = torch.randn(3, 2, 16)
    assert not torch.equal(other(x, x, x)[0], ours(x, x, x)[0])
    other.load_state_dict(ours.state_dict())
    assert torch.equal(other(x, x, x)[0], ours(x, x, x)[0])


def test_an_encoder_layer_takes_it_in_place_of_its_own() -> None:
    torch.manual_seed(0)
    layer: Any = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    wanted = layer(x)
    layer.self_attn = dynamic.MultiheadAttention.from_float(layer.self_attn)
    with torch.no_grad():
        assert float((layer(x) - wanted).abs().max()) < 0.1
    assert "DynamicQuantizedMultiheadAttention" in repr(layer)


def test_keys_of_its_own_are_refused() -> None:
    with pytest.raises(SpecError, match="add_bias_kv"):
        dynamic.MultiheadAttention.from_float(nn.MultiheadAttention(16, 4, add_bias_kv=True))
