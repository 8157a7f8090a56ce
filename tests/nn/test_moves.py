"""ATen's ops that move numbers: levels are moved, and the grid stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from quantc.errors import DataError, MixedTensorsError
from quantc.nn import QuantizedTensor, quantize_per_tensor
from tests.support.nn_cases import both, steps_apart

MOVES: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda q: q.flatten(1),
    "view": lambda q: q.view(2, -1),
    "reshape": lambda q: q.reshape(-1),
    "permute": lambda q: q.permute(0, 2, 3, 1),
    "transpose": lambda q: q.transpose(1, 2),
    "select": lambda q: q[0],
    "slice": lambda q: q[:, 1:, ::2],
    "unsqueeze": lambda q: q.unsqueeze(0).squeeze(0),
    "index": lambda q: q[:, torch.tensor([2, 0])],
    "chunk": lambda q: q.chunk(2, 1)[1],
    "split": lambda q: q.split([1, 3], 1)[1],
    "unbind": lambda q: q.unbind(0)[1],
    "cat": lambda q: torch.cat([q, q], 1),
    "stack": lambda q: torch.stack([q, q]),
    "clone": lambda q: q.clone(),
    "contiguous": lambda q: q.permute(0, 2, 3, 1).contiguous(),
    "max": lambda q: q.max(),
    "max of axis": lambda q: q.max(1)[0],
    "sort": lambda q: q.sort(1)[0],
    "topk": lambda q: q.topk(2, 1)[0],
    "pad": lambda q: functional.pad(q, (1, 2, 0, 1)),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("inference", [False, True])
def test_moves_are_torchs(name: str, inference: bool) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(inference):
        ours, theirs = both(torch.randn(2, 4, 8, 8))
        found, wanted = MOVES[name](ours), MOVES[name](theirs)
    assert steps_apart(found, wanted) == 0


def test_joining_wants_one_grid() -> None:
    q, other = quantize_per_tensor(torch.randn(4), 0.1, 0), quantize_per_tensor(torch.randn(4), 0.2, 0)
    with pytest.raises(DataError, match="several"):
        torch.cat([q, other])
    with pytest.raises(MixedTensorsError, match="QuantStub"):
        torch.cat([q, torch.randn(4)])
    with pytest.raises(DataError, match=r"torch\.float32"):
        QuantizedTensor(torch.randn(3), 0.1, 0)
