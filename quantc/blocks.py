"""A convolution that skips every other place of an image of few channels, as one over blocks of two by two places.

Kernels on integers multiply four or more channels at a time. An image has three, so that a network's first layer, which
has the largest image, leaves most of each instruction empty. With the four places of a block as channels of their own the
same convolution takes every block, on four times as many channels. The products are the same, and so are their sums; what
is added to fill up the window are weights of zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from quantc.types import TensorType

SIZE = 2
"""How many places a block has along each axis: the stride of the convolutions."""
MOST_CHANNELS = 3
"""Images of more fill an instruction by themselves."""
IMAGE = 4
"""How many axes a batch of images has."""
ORDER = (0, 3, 5, 1, 2, 4)
"""The axes batch, channel, block, row in it, block, column in it, as channels of blocks have them: row, column, channel.
So does SpaceToDepth of ONNX."""


@dataclass(frozen=True)
class Window:
    """What a convolution sees of a batch of images, along rows and columns."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """The same convolution over blocks."""

    weight: Tensor
    begin: tuple[int, int]
    """How many blocks of padding come before the image, along rows and columns."""
    end: tuple[int, int]
    """How many come after it."""


def parted(image: TensorType) -> tuple[list[int | str], list[int | str]]:
    """The sizes of images with the places of a block apart, and with them as channels."""
    count, channels, *sizes = image.shape
    rows, columns = (int(size) // SIZE for size in sizes)
    return (
        [count, channels, rows, SIZE, columns, SIZE],
        [count, SIZE * SIZE * int(channels), rows, columns],
    )


def blocks_of(weight: Tensor, image: TensorType | None, window: Window) -> Blocks | None:
    """A convolution over blocks, for a weight in which 0 stands for zero; None where there is no such, or it gains nothing."""
    if image is None or image.rank != IMAGE or weight.shape[1] > MOST_CHANNELS or window.groups != 1:
        return None
    if tuple(window.stride) != (SIZE, SIZE) or tuple(window.dilation) != (1, 1):
        return None
    sizes = [size for size in image.shape[2:] if isinstance(size, int) and size % SIZE == 0]
    if len(sizes) < len(window.stride):
        return None
    sides = [_side(*each) for each in zip(weight.shape[2:], window.padding, sizes, strict=True)]
    rows, columns = sides
    whole = functional.pad(weight, (columns.before, columns.after, rows.before, rows.after))
    outputs, channels = weight.shape[:2]
    apart = whole.reshape(outputs, channels, rows.count, SIZE, columns.count, SIZE)
    made = apart.permute(*ORDER).reshape(outputs, SIZE * SIZE * channels, rows.count, columns.count)
    return Blocks(made.contiguous(), (rows.begin, columns.begin), (rows.end, columns.end))


@dataclass(frozen=True)
class _Side:
    """One axis: zeros before and after the weights, blocks in the window, blocks of padding before and after the image."""

    before: int
    after: int
    count: int
    begin: int
    end: int


def _side(taps: int, padding: int, size: int) -> _Side:
    before = -padding % SIZE  # the window begins where a block does
    count = -(-(before + taps) // SIZE)
    begin = (padding + before) // SIZE
    results = (size + 2 * padding - taps) // SIZE + 1
    return _Side(before, count * SIZE - before - taps, count, begin, results - 1 + count - begin - size // SIZE)
