"""Tables of embeddings in bytes, or two numbers to a byte, and sums of their rows."""

from __future__ import annotations

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
from torch import nn

from quantc.nn import qconfig as qconfigs
from quantc.nn import quantized, torch_state_dict
from tests.support.nn_cases import engine


@pytest.mark.parametrize("dtype", ["quint8", "quint4x2"])
def test_embeddings(dtype: str) -> None:
    with engine("x86"):
        torch.manual_seed(0)
        four = qconfigs.float_qparams_weight_only_qconfig_4bit
        qconfig = qconfigs.float_qparams_weight_only_qconfig if dtype == "quint8" else four
        indices, offsets = torch.randint(20, (13,)), torch.tensor([0, 4, 4, 9])
        table = nn.Embedding(20, 16)
        table.qconfig = qconfig  # type: ignore[assignment]
        ours = quantized.Embedding.from_float(table)
        step = ours.weight().q_per_channel_scales().max()
        assert float((ours(indices) - table(indices)).abs().max()) <= float(step) * 0.51
        if dtype == "quint8":
            theirs = ao_quantized.Embedding.from_float(table)  # type: ignore[no-untyped-call]
            assert torch.allclose(ours(indices), theirs(indices), atol=1e-6)
            other = quantized.Embedding(20, 16)
            other.load_state_dict(theirs.state_dict())
            assert torch.equal(other(indices), ours(indices))
            theirs.load_state_dict(torch_state_dict(ours))
        for mode in ("sum", "mean", "max"):
            bag = nn.EmbeddingBag(20, 16, mode=mode)
            bag.qconfig = qconfig  # type: ignore[assignment]
            made = quantized.EmbeddingBag.from_float(bag)
            copied = nn.EmbeddingBag(20, 16, mode=mode, _weight=made.weight().dequantize())
            assert torch.allclose(made(indices, offsets), copied(indices, offsets), atol=1e-5)
            assert torch.allclose(made(indices[:12].view(3, 4)), copied(indices[:12].view(3, 4)), atol=1e-5)
