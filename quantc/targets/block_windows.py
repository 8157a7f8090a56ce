"""Space-to-depth for strided convolutions of images with few channels: blocks of two pixels, or two by two, become channels.

Integer kernels multiply four or more channels at a time. An image has three, so that a network's first layer, which has
the largest image, leaves most of each instruction empty. With the pixels of a block as channels, the same convolution
has stride 1 over blocks, on two or four times as many channels. Products and sums are the same; the window is padded
with zero weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from quantc.ir.types import TensorType

Size = tuple[int, int]
"""Extent along rows and columns."""
SQUARE: Size = (2, 2)
TALL: Size = (2, 1)
"""Blocks. Along each axis they are as large as the steps of the convolution, or one place. Tall ones are made by moving whole rows."""
MAX_CHANNELS = 3
"""Images of more fill an instruction by themselves."""
IMAGE = 4
"""Rank of a batch of images."""
ORDER = (0, 3, 5, 1, 2, 4)
"""The axes batch, channel, block, row in it, block, column in it, as channels of blocks have them: row, column, channel.
So does SpaceToDepth of ONNX."""


@dataclass(frozen=True)
class BlockWindow:
    """Stride, padding, dilation and groups of a 2D convolution."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


@dataclass(frozen=True, eq=False)
class Blocks:
    """The equivalent convolution over blocks."""

    weight: Tensor
    begin: Size
    """Blocks of padding before the image."""
    end: Size
    """Blocks of padding after the image."""
    stride: Size


def block_shapes(image: TensorType, block: Size) -> tuple[list[int | str], list[int | str]]:
    """Image shapes with the pixels of a block on axes of their own, and with them as channels."""
    count, channels, *sizes = image.shape
    (high, wide), (rows, columns) = block, (int(size) // step for size, step in zip(sizes, block, strict=True))
    return [count, channels, rows, high, columns, wide], [count, high * wide * int(channels), rows, columns]


def blocks_of(weight: Tensor, image: TensorType | None, window: BlockWindow, block: Size) -> Blocks | None:
    """The convolution over blocks, for a weight whose level 0 is zero; None where it does not apply or gains nothing."""
    if image is None or image.rank != IMAGE or weight.shape[1] > MAX_CHANNELS or window.groups != 1:
        return None
    if any(wide not in (1, step) for wide, step in zip(block, window.stride, strict=True)):
        return None
    sizes = [
        size for size, wide in zip(image.shape[2:], block, strict=True) if isinstance(size, int) and size % wide == 0
    ]
    if len(sizes) < len(block) or tuple(window.dilation) != (1, 1):
        return None
    settings = zip(weight.shape[2:], window.padding, window.stride, sizes, block, strict=True)
    rows, columns = (_side(*each) for each in settings)
    whole = functional.pad(weight, (columns.before, columns.after, rows.before, rows.after))
    outputs, channels = weight.shape[:2]
    apart = whole.reshape(outputs, channels, rows.count, block[0], columns.count, block[1])
    made = apart.permute(*ORDER).reshape(outputs, block[0] * block[1] * channels, rows.count, columns.count)
    return Blocks(made.contiguous(), (rows.begin, columns.begin), (rows.end, columns.end), (rows.step, columns.step))


@dataclass(frozen=True)
class _Side:
    """One axis: zeros before and after the weights, blocks in the window, blocks of padding before and after the image,
    and how many blocks are from one window to the next."""

    before: int
    after: int
    count: int
    begin: int
    end: int
    step: int


def _side(taps: int, padding: int, stride: int, size: int, block: int) -> _Side:
    before = -padding % block  # the window begins where a block does
    count = -(-(before + taps) // block)
    begin = (padding + before) // block
    results, step = (size + 2 * padding - taps) // stride + 1, stride // block
    end = (results - 1) * step + count - begin - size // block
    return _Side(before, count * block - before - taps, count, begin, max(end, 0), step)
