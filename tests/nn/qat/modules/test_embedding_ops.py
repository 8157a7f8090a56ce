"""Tables of embeddings for training."""

from __future__ import annotations

import pytest
import torch
import torch.ao.nn.qat as ao_qat
from torch import nn

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
