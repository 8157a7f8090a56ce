"""Attention with places for observers: in float it is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quantc.errors import SpecError
from quantc.nn.quantizable import MultiheadAttention
from quantc.nn.stubs import DeQuantStub, QuantStub


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"batch_first": True}, {"kdim": 5, "vdim": 7}])
def test_results_and_weights_are_torchs(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    source = nn.MultiheadAttention(8, 2, **settings).eval()
    made = MultiheadAttention.from_float(source)
    query = torch.randn(3, 3, 8)
    key, value = (torch.randn(3, 3, width or 8) for width in (source.kdim, source.vdim))
    with torch.no_grad():
        torch.testing.assert_close(made(query, key, value), source(query, key, value), atol=1e-6, rtol=1e-5)


def test_projections_go_by_the_names_of_torch_ao() -> None:
    made = MultiheadAttention(8, 2)
    linears = [name for name, part in made.named_children() if isinstance(part, nn.Linear)]
    assert linears == ["linear_Q", "linear_K", "linear_V", "out_proj"]


def test_what_is_between_projections_is_float_once_converted() -> None:
    made = MultiheadAttention(8, 2)
    ends = {name for name, part in made.named_modules() if isinstance(part, DeQuantStub)}
    assert ends == {"dequant.query", "dequant.key", "dequant.value"}
    assert isinstance(made.quant_attn_output, QuantStub)


def test_the_mode_is_that_of_the_float_module_and_keys_of_its_own_are_refused() -> None:
    assert MultiheadAttention.from_float(nn.MultiheadAttention(8, 2).train()).training
    assert not MultiheadAttention.from_float(nn.MultiheadAttention(8, 2).eval()).training
    with pytest.raises(SpecError, match="add_zero_attn"):
        MultiheadAttention.from_float(nn.MultiheadAttention(8, 2, add_zero_attn=True))
