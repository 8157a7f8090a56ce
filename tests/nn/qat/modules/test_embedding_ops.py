"""Tables of embeddings for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.qat as ao_qat
from torch import nn

from quantc.errors import SpecError
from quantc.nn import qat
from quantc.nn import qconfig as qconfigs


@pytest.mark.parametrize("name", ["Embedding", "EmbeddingBag"])
def test_tables(name: str) -> None:
    torch.manual_seed(0)
    table = getattr(nn, name)(10, 12)
    table.qconfig = qconfigs.default_embedding_qat_qconfig
    ours = getattr(qat, name).from_float(table)
    theirs = getattr(ao_qat, name).from_float(table)
    indices = torch.randint(10, (4, 3))
    assert torch.equal(ours(indices), theirs(indices))
    assert not torch.equal(ours(indices), table(indices))


def trained(source: Any) -> Any:
    torch.manual_seed(0)
    source.qconfig = qconfigs.default_embedding_qat_qconfig
    return getattr(qat, type(source).__name__).from_float(source)


def test_settings_of_a_table_are_kept() -> None:
    made = trained(nn.Embedding(10, 4, padding_idx=2, scale_grad_by_freq=True))
    assert (made.padding_idx, made.scale_grad_by_freq) == (2, True)
    made(torch.tensor([2, 3])).sum().backward()
    assert not bool(made.weight.grad[2].any()), "what is padding does not learn"
    assert bool(made.weight.grad[3].any())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_are_those_of_the_rounded_table(mode: str) -> None:
    source: Any = nn.EmbeddingBag(10, 4, mode=mode)
    made = trained(source)
    indices, offsets = torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2])
    found = made(indices, offsets)
    rounded = made.weight_fake_quant(source.weight)
    assert torch.equal(found, nn.functional.embedding_bag(indices, rounded, offsets, mode=mode))


def test_a_table_goes_back_to_float_and_wants_float_zero_points() -> None:
    made = trained(nn.Embedding(10, 4))
    back: Any = made.to_float()
    assert type(back) is nn.Embedding
    assert torch.equal(back.weight, made.weight)
    with pytest.raises(SpecError, match="float zero points"):
        qat.Embedding(10, 4, qconfig=qconfigs.default_qat_qconfig)
