"""ATen's ops that move numbers: levels are moved, and the grid stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from quantc.errors import DataError, MixedTensorsError
from quantc.nn import QuantizedTensor, quantize_per_channel, quantize_per_tensor
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


def test_places_are_those_of_the_numbers() -> None:
    q = quantize_per_tensor(torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.0, -4.0]]), 0.5, 100)
    assert q.argmax(1).tolist() == [2, 0]
    assert q.argmin().item() == 5
    assert q.argsort(1).tolist() == [[1, 0, 2], [2, 1, 0]]


@pytest.mark.parametrize(("value", "number"), [(0.0, 0.0), (1.2, 1.0), (1e6, 77.5), (-1e6, -50.0)])
def test_padding_is_the_level_nearest_to_its_value(value: float, number: float) -> None:
    q = quantize_per_tensor(torch.tensor([2.0]), 0.5, 100)
    assert functional.pad(q, (1, 0), value=value).dequantize().tolist() == [number, 2.0]


def test_levels_are_copied_between_tensors_on_one_grid_alone() -> None:
    into, given = (quantize_per_tensor(torch.tensor([number]), 0.5, 100) for number in (1.0, 2.0))
    into.copy_(given)
    assert into.dequantize().tolist() == [2.0]
    with pytest.raises(DataError, match="grid"):
        into.copy_(quantize_per_tensor(torch.tensor([2.0]), 0.25, 100))
    with pytest.raises(MixedTensorsError, match="quantized"):
        into.copy_(torch.ones(1))


def test_views_of_what_lies_channels_last_are_copies() -> None:
    q = quantize_per_tensor(torch.randn(2, 3, 4, 4), 0.1, 100)
    last = q.like(q.data_of.to(memory_format=torch.channels_last))
    assert torch.equal(last.view(2, -1).int_repr(), q.int_repr().reshape(2, -1))


@pytest.mark.parametrize(
    "move", [lambda q: q[0], lambda q: q.reshape(-1), lambda q: q.chunk(2, 0), lambda q: q.max(), lambda q: q.sort()]
)
def test_scales_by_channel_stay_with_their_channels(move: Callable[[Any], Any]) -> None:
    q = quantize_per_channel(torch.randn(2, 3), torch.tensor([0.1, 0.2]), torch.zeros(2, dtype=torch.int64), 0)
    with pytest.raises(DataError, match="channel"):
        move(q)
    turned: Any = q.t()
    assert turned.q_per_channel_axis() == 1
    assert torch.equal(q.clone(), q)


def test_tensors_are_equal_if_levels_and_grids_are() -> None:
    q = quantize_per_tensor(torch.tensor([1.0]), 0.5, 2)
    assert torch.equal(q, q.clone())
    assert not torch.equal(q, QuantizedTensor(q.int_repr(), 0.5, 3))


def test_strides_are_set_only_where_they_mean_nothing() -> None:
    q = quantize_per_tensor(torch.randn(2, 3, 1, 1), 0.1, 100)
    assert q.as_strided_((2, 3, 1, 1), (3, 1, 3, 3)) is q
    with pytest.raises(MixedTensorsError, match="as_strided_"):
        q.as_strided_((2, 3, 1, 1), (1, 2, 1, 1))


def test_a_permutation_takes_the_axis_of_channels_along() -> None:
    x = torch.randn(2, 3, 4)
    q = quantize_per_channel(x, torch.tensor([0.1, 0.2, 0.3]), torch.zeros(3, dtype=torch.int64), 1)
    turned = q.permute(1, 2, 0)
    assert turned.q_per_channel_axis() == 0
    assert torch.equal(turned.dequantize(), q.dequantize().permute(1, 2, 0))
    assert q.permute(-1, 0, 1).q_per_channel_axis() == 2
