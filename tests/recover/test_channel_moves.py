"""Labels behind moves: those of single elements, moved by torch, are what compact labels stand for."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantc.recover.channel_moves import compact, expanded, joined, moved, reshaped

SHAPES = st.lists(st.sampled_from((1, 2, 3, 4)), min_size=1, max_size=4)


@given(SHAPES, st.lists(st.booleans(), min_size=16, max_size=16))
def test_reshaped_labels_are_the_reshaped_elements(shape: list[int], choices: list[bool]) -> None:
    carrying = choices[: len(shape)]
    own = [size if carries else 1 for size, carries in zip(shape, carrying, strict=True)]
    labels = np.arange(math.prod(own), dtype=np.int64).reshape(own)
    sizes = [factor for size in shape for factor in ((2, 2) if size == 4 else (size,))]
    after: list[int] = []
    for size, joins in zip(sizes, choices[4:], strict=False):
        if after and joins:
            after[-1] *= size
        else:
            after.append(size)
    found = reshaped(labels, shape, after)
    full = torch.from_numpy(labels).expand(shape).reshape(after)
    assert torch.equal(torch.from_numpy(found).expand(after), full)


def test_the_axes_without_labels_stay_so() -> None:
    labels = np.arange(6, dtype=np.int64).reshape(1, 6, 1, 1)
    assert reshaped(labels, (5, 6, 3, 1), (5, 2, 3, 3)).shape == (1, 2, 3, 1)
    assert reshaped(labels, (5, 6, 2, 1), (5, 12)).tolist() == [[0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]]


def test_moved_by_the_op_itself() -> None:
    labels = np.arange(6, dtype=np.int64).reshape(1, 6)
    found = moved(torch.ops.aten.flip.default, (expanded(labels, (4, 6)), [1]), {})
    assert isinstance(found, np.ndarray)
    assert found.tolist() == [[5, 4, 3, 2, 1, 0]]
    parts = moved(torch.ops.aten.chunk.default, (expanded(labels, (4, 6)), 2, 1), {})
    assert [part.tolist() for part in parts] == [[[0, 1, 2]], [[3, 4, 5]]]


def test_joined_side_by_side() -> None:
    left, right = (np.arange(start, start + 2, dtype=np.int64).reshape(1, 2) for start in (0, 2))
    assert joined([left, right], [(5, 2), (5, 2)], -1).tolist() == [[0, 1, 2, 3]]
    assert joined([left, right], [(1, 2), (1, 2)], 0).tolist() == [[0, 1], [2, 3]]


def test_compact() -> None:
    assert compact(torch.tensor([[1, 2], [1, 2]])).tolist() == [[1, 2]]
    assert compact(torch.tensor([[1, 2], [1, 3]])).shape == (2, 2)
