"""Parts of tensors for the delegate: `select`, `narrow`, `split`, `chunk` and `unbind` become slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quantc as qc
from quantc.passes.legalize_slices import is_cut
from tests.support.spelled import spelled


@settings(max_examples=12)
@given(
    shape=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    axis=st.integers(-4, 3),
    step=st.integers(1, 5),
    kind=st.sampled_from(["chunk", "split", "unbind"]),
)
def test_parts_are_those_of_torch(shape: list[int], axis: int, step: int, kind: str) -> None:
    axis = axis % len(shape)

    class Parts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            match kind:
                case "chunk":
                    return x.chunk(step, axis)
                case "split":
                    return torch.split(x, step, axis)
                case _:
                    return x.unbind(axis)

    x = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float32).reshape(shape)
    program = qc.capture(Parts(), (x,))
    for ours, theirs in zip(spelled(program)(x), Parts()(x), strict=True):
        assert torch.equal(ours, theirs)


def test_cuts_at_places_that_vary_are_left_alone() -> None:
    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.narrow(1, x.shape[0] - 1, 1) + x.select(1, x.shape[0] - 2)[:, None]

    program = qc.capture(
        Last(), (torch.randn(3, 8, 4),), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=8)},)
    )
    x = torch.randn(5, 8, 4)
    assert torch.equal(spelled(program)(x), Last()(x))


def test_parts_of_nothing() -> None:
    class Empty(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, *torch.split(x[:, :0], 0, 1)], 1)

    x = torch.randn(2, 3)
    assert torch.equal(spelled(qc.capture(Empty(), (x,)))(x), x)


def cuts(function: Callable[[Tensor], Any]) -> list[tuple[int, int, int]]:
    """Axis, begin and end of the slices that a function of 2 by 6 by 4 numbers becomes, whose values are the same."""

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return function(x)

    x = torch.arange(48.0).reshape(2, 6, 4)
    own = spelled(qc.capture(Cut(), (x,), dynamic_shapes=None))
    for got, want in zip(pytree.tree_leaves(own(x)), pytree.tree_leaves(Cut()(x)), strict=True):
        assert torch.equal(got, want)
    return [node.args[1:] for node in own.graph.nodes if node.target is torch.ops.aten.slice.Tensor]


def test_where_each_part_begins_and_ends() -> None:
    assert cuts(lambda x: x.select(1, -1)) == [(1, 5, 6)]
    assert cuts(lambda x: x.narrow(-1, 1, 2)) == [(2, 1, 3)]
    assert cuts(lambda x: torch.split(x, [1, 3, 2], 1)) == [(1, 0, 1), (1, 1, 4), (1, 4, 6)]
    assert cuts(lambda x: torch.split(x, 4, 1)) == [(1, 0, 4), (1, 4, 6)]
    assert cuts(lambda x: x.chunk(4, 1)) == [(1, 0, 2), (1, 2, 4), (1, 4, 6)], "chunks of two: there are three"
    assert cuts(lambda x: x.unbind(0)) == [(0, 0, 1), (0, 1, 2)]
    assert cuts(lambda x: x.chunk(3, 1)[1]) == [(1, 2, 4)], "parts that nobody reads are not cut"


def test_vectors_are_left_alone() -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x[0] + x.narrow(0, 1, 1)

    program = qc.capture(First(), (torch.ones(3),), dynamic_shapes=None)
    assert not any(is_cut(node) for node in program.graph.nodes if node.op == "call_function")
