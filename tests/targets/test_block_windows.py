"""Convolutions of images of three channels, over blocks or with a fourth: the same sums, in the forms that runtimes are fast on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from quantc.ir.types import TensorType
from quantc.targets.block_windows import ORDER, SQUARE, TALL, BlockWindow, Size, block_shapes, blocks_of


@given(
    taps=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    sizes=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    channels=st.integers(1, 3),
    block=st.sampled_from([SQUARE, TALL, (1, 2)]),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_sums_over_blocks_are_those_of_the_image(
    taps: Size, padding: Size, sizes: Size, channels: int, block: Size, steps: Size
) -> None:
    chance = torch.Generator().manual_seed(0)
    rows, columns = (2 * size if wide > 1 else size + max(taps) for size, wide in zip(sizes, block, strict=True))
    stride = tuple(wide if wide > 1 else step for wide, step in zip(block, steps, strict=True))
    shape = (2, channels, rows, columns)
    image = torch.randint(-127, 128, shape, generator=chance).double()
    weight = torch.randint(-127, 128, (4, channels, *taps), generator=chance).double()
    found = blocks_of(weight, TensorType(torch.float32, shape), BlockWindow(stride, padding, (1, 1), 1), block)
    assert found is not None
    assert min(*found.begin, *found.end) >= 0
    apart, whole = block_shapes(TensorType(torch.float32, shape), block)
    blocks = image.reshape(apart).permute(*ORDER).reshape(whole)  # type: ignore[arg-type]
    (top, left), (bottom, right) = found.begin, found.end
    made = functional.conv2d(functional.pad(blocks, (left, right, top, bottom)), found.weight, stride=found.stride)
    assert torch.equal(made, functional.conv2d(image, weight, stride=stride, padding=padding))


@pytest.mark.parametrize(
    ("shape", "window"),
    [
        ((1, 4, 8, 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((1, 3, 9, 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((1, 3, "h", 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((3, 8, 8), BlockWindow((2, 2), (1, 1), (1, 1), 1)),
        ((1, 3, 8, 8), BlockWindow((1, 1), (1, 1), (1, 1), 1)),
        ((1, 3, 8, 8), BlockWindow((2, 2), (1, 1), (2, 2), 1)),
        ((1, 3, 8, 8), BlockWindow((2, 2), (1, 1), (1, 1), 3)),
    ],
)
def test_what_has_no_blocks(shape: tuple[int | str, ...], window: BlockWindow) -> None:
    channels = 4 if shape[1] == 4 else 3 // window.groups
    weight = torch.ones(6, channels, 3, 3, dtype=torch.int8)
    assert blocks_of(weight, TensorType(torch.float32, shape), window, SQUARE) is None
