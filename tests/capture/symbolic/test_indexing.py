"""`x[...]` and `x[...] = v`, lowered to the ops that torch itself calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.capture.export.dimensions import DynamicDim
from quantc.capture.refused_trace import RefusedError
from tests.support.symbolic_traces import traced

X = torch.arange(24.0).reshape(2, 3, 4)
INDICES: dict[str, Any] = {
    "int": 1,
    "negative": -1,
    "ints": (0, 2),
    "slice": slice(1, None),
    "step": (slice(None), slice(None, None, 2)),
    "all": slice(None),
    "none": (None, 0),
    "ellipsis": (..., 1),
    "ellipsis in the middle": (0, ..., slice(1, 3)),
    "ellipsis and none": (..., None, 2),
    "nothing": (),
    "list": [1, 0, 1],
    "tensor": torch.tensor([0, 1, 1]),
    "tensors": (torch.tensor([0, 1]), torch.tensor([2, 0])),
    "tensor behind a slice": (slice(None), torch.tensor([2, 0])),
    "tensor behind an int": (1, torch.tensor([[0, 1]])),
    "mask": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", INDICES)
def test_items_are_those_of_eager(name: str) -> None:
    index = INDICES[name]
    trace = traced(lambda s, x: x[index], X)
    assert torch.equal(trace(X), X[index])


@pytest.mark.parametrize("value", [7.0, torch.tensor(5.0)], ids=["number", "tensor"])
@pytest.mark.parametrize("name", INDICES)
def test_assignments_write_where_eager_writes(name: str, value: Any) -> None:
    index = INDICES[name]

    def forward(self: Any, x: Tensor) -> Tensor:
        y = x + 0
        y[index] = value
        return y

    trace = traced(forward, X)
    assert torch.equal(trace(X), forward(None, X))


def test_an_index_that_selects_everything_gives_another_tensor() -> None:
    assert traced(lambda s, x: x[:], X).names == ["alias.default"]
    assert traced(lambda s, x: x[0], X).calls == ["select.int(x, 0, 0)"]
    assert traced(lambda s, x: x[:, 1:], X).calls == [f"slice.Tensor(x, 1, 1, {2**63 - 1})"]


def test_bounds_that_are_open_sizes_stay_open() -> None:
    rows = {(0, 0): DynamicDim("rows", 2, None)}
    trace = traced(lambda s, x: x[: x.shape[0] - 1], X, marks=rows)
    for count in (2, 6):
        given = torch.randn(count, 3, 4)
        assert torch.equal(trace(given), given[: count - 1])


@pytest.mark.parametrize(
    ("forward", "word"),
    [
        (lambda s, x: x[True], "bool"),
        (lambda s, x: x[0, False], "bool"),
        (lambda s, x: x["key"], "'key'"),
    ],
)
def test_indices_that_are_not_followed_are_refused(forward: Callable[..., Any], word: str) -> None:
    with pytest.raises(RefusedError, match=word):
        traced(forward, X)


def test_an_ellipsis_without_a_rank_counts_from_the_end_if_one_index_follows() -> None:
    forwards: tuple[Callable[..., Any], ...] = (lambda s, x: x[..., 0], lambda s, x: x[..., 1:], lambda s, x: x[0, ...])
    for forward in forwards:
        trace = traced(forward)
        for given in (X, X[0]):
            assert torch.equal(trace(given), forward(None, given))
    with pytest.raises(RefusedError, match="rank"):
        traced(lambda s, x: x[..., 0, 1])
