"""Coordinates: moving elements and rotating vectors commute, whatever the moves."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from quantc.recover.coordinates import NONE, Coordinates, NotAVectorError
from quantc.recover.orthogonal import rotation

WIDTH = 4
MOVES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.transpose(0, 1),
    lambda x: x.transpose(-1, -2),
    lambda x: x.flatten(1),
    lambda x: x.reshape(-1, x.shape[-1]),
    lambda x: torch.unflatten(x, -1, (-1, WIDTH)),
    lambda x: x.unsqueeze(1),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.chunk(2, 0)[-1],
    lambda x: x.chunk(2, -1)[0],
    lambda x: x.repeat_interleave(2, 0),
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
)


def turned(x: Tensor, at: Coordinates, matrix: Tensor) -> Tensor:
    """Every vector times a matrix, one by one."""
    ids = at.expanded(x.shape).reshape(-1)
    found = x.reshape(-1).clone()
    for vector in torch.unique(ids[ids != NONE] // at.width):
        where = torch.stack([(ids == vector * at.width + component).nonzero()[0, 0] for component in range(at.width)])
        found[where] = x.reshape(-1)[where] @ matrix
    return found.reshape(x.shape)


@given(
    st.lists(st.integers(0, len(MOVES) - 1), max_size=4), st.sampled_from([(2, 3, 8), (4, 12), (3, 4), (2, 2, 2, 4)])
)
def test_moving_commutes_with_rotating(chain: list[int], shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).sin()
    at, matrix = Coordinates.along(len(shape), len(shape) - 1, shape[-1], WIDTH), rotation(WIDTH, 0)
    for index in chain:
        move = MOVES[index]
        try:
            after = at.moved(move, x.shape)
        except (NotAVectorError, RuntimeError, IndexError):
            return
        if after is None or x.numel() > 300:
            return
        moved = move(x)
        torch.testing.assert_close(move(turned(x, at, matrix)), turned(moved, after, matrix), atol=1e-12, rtol=0)
        back = after.moved_back(move, x.shape, moved.shape)
        torch.testing.assert_close(turned(moved, after, matrix), move(turned(x, back, matrix)), atol=1e-12, rtol=0)
        x, at = moved, after


def test_a_vector_that_is_cut_says_how_wide_its_parts_are() -> None:
    at = Coordinates.along(2, 1, 12, 12)
    with pytest.raises(NotAVectorError) as cut:
        at.moved(lambda x: x.chunk(3, 1)[1], torch.Size((2, 12)))
    assert cut.value.width == 4
    with pytest.raises(NotAVectorError) as spread:
        at.moved(lambda x: x.reshape(2, 3, 4), torch.Size((2, 12)))
    assert spread.value.width == 4


def test_values_in_a_joint_projection_are_found_where_they_lie() -> None:
    """Heads of queries, keys and values, one after the other: the last third of each head."""
    heads = Coordinates.along(4, 3, 2, 2)
    found = heads.moved_back(
        lambda x: x.reshape(1, 5, 2, 6).transpose(1, 2).chunk(3, -1)[2],
        torch.Size((1, 5, 12)),
        torch.Size((1, 2, 5, 2)),
    )
    assert found.line.tolist() == [NONE] * 4 + [0, 1] + [NONE] * 4 + [2, 3]
    assert found.vectors().tolist() == [[4, 5], [10, 11]]


def test_ids_join_where_they_agree() -> None:
    left = Coordinates.on(1, 0, torch.tensor([1, 1, 0, 0]).bool(), 2)
    right = Coordinates.on(1, 0, torch.tensor([0, 0, 1, 1]).bool(), 2)
    both = left.joined(right)
    assert both is not None
    assert both.equals(Coordinates.along(1, 0, 4, 2))
    assert both.joined(left) is not None
    turned_round = Coordinates(torch.tensor([1, 0, 3, 2]), 2)
    assert both.joined(turned_round) is None
