"""Tables of embeddings in bytes, or two numbers to a byte, and sums of their rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
from torch import nn

from quantc.errors import SpecError
from quantc.nn import QuantizedTensor, quantized, torch_state_dict
from quantc.nn import qconfig as qconfigs
from quantc.nn.quantized.modules.embedding_ops import levels_of, pairs
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


@pytest.mark.parametrize("width", [1, 4, 5])
def test_levels_of_four_bits_go_two_to_a_byte_and_come_back(width: int) -> None:
    levels = torch.randint(0, 16, (3, width), dtype=torch.uint8)
    packed = pairs(levels)
    assert packed.shape == (3, (width + 1) // 2)
    assert torch.equal(levels_of(packed, width), levels)
    assert pairs(torch.tensor([[3, 10]], dtype=torch.uint8)).tolist() == [[3 + 10 * 16]]


def table(dtype: torch.dtype = torch.quint8) -> quantized.Embedding:
    """Rows 0, 1 and 2, in steps of 1, 2 and 3 from -1, -2 and -3 on."""
    levels = torch.tensor([[0, 1, 2], [1, 2, 3], [2, 3, 4]], dtype=torch.uint8)
    weight = QuantizedTensor(levels, torch.tensor([1.0, 2.0, 3.0]), torch.ones(3), 0)
    return quantized.Embedding(3, 3, dtype=dtype, _weight=weight)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.quint4x2])
def test_rows_are_their_levels_less_the_zero_point_times_the_scale(dtype: torch.dtype) -> None:
    made = table(dtype)
    assert made(torch.tensor([[2, 0], [1, 1]])).tolist() == [
        [[3.0, 6.0, 9.0], [-1.0, 0.0, 1.0]],
        [[0.0, 2.0, 4.0], [0.0, 2.0, 4.0]],
    ]
    assert made.tensor("weight").shape == (3, 2 if dtype is torch.quint4x2 else 3)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.quint4x2])
@pytest.mark.parametrize(
    ("mode", "wanted"), [("sum", [2.0, 6.0, 10.0]), ("mean", [1.0, 3.0, 5.0]), ("max", [3.0, 6.0, 9.0])]
)
def test_bags_are_sums_means_or_maxima_and_empty_ones_zero(mode: str, wanted: list[float], dtype: torch.dtype) -> None:
    made = quantized.EmbeddingBag(3, 3, mode=mode, dtype=dtype, _weight=table().weight())
    found = made(torch.tensor([2, 0]), torch.tensor([0, 2]))
    assert found.tolist() == [wanted, [0.0, 0.0, 0.0]]


def test_weights_of_samples_and_padding_are_torchs() -> None:
    weight = table().weight()
    plain = nn.EmbeddingBag(3, 3, mode="sum", padding_idx=1, _weight=weight.dequantize())
    made = quantized.EmbeddingBag(3, 3, mode="sum", padding_idx=1, _weight=weight)
    indices, offsets, factors = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2]), torch.tensor([1.0, 2.0, 0.5, 3.0])
    assert torch.allclose(made(indices, offsets), plain(indices, offsets))
    free = quantized.EmbeddingBag(3, 3, _weight=weight)
    wanted = nn.EmbeddingBag(3, 3, mode="sum", _weight=weight.dequantize())(indices, offsets, factors)
    assert torch.allclose(free(indices, offsets, factors), wanted)


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SpecError, match="qint8"):
        quantized.Embedding(3, 3, dtype=torch.qint8)
    with pytest.raises(SpecError, match="median"):
        quantized.EmbeddingBag(3, 3, mode="median")
    with pytest.raises(SpecError, match="3 rows of 3"):
        table().set_weight(QuantizedTensor(torch.zeros(2, 3, dtype=torch.uint8), torch.ones(2), torch.zeros(2), 0))
    large = QuantizedTensor(torch.full((3, 3), 16, dtype=torch.uint8), torch.ones(3), torch.zeros(3), 0)
    with pytest.raises(SpecError, match="16"):
        quantized.Embedding(3, 3, dtype=torch.quint4x2, _weight=large)
    source: Any = nn.Embedding(3, 3)
    source.qconfig = qconfigs.default_qconfig
    with pytest.raises(SpecError, match="qint8"):
        quantized.Embedding.from_float(source)
