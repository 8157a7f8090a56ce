"""Bit packing of integers narrower than a byte: the form they are saved in.

Integers of 2 or 4 bits are whole in a byte. Other widths are split into fields that are: 6 bits are the lower 4 of all
numbers, two per byte, and then the upper 2 of all, four per byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from quantc.errors import DataError

Width = Literal[2, 3, 4, 5, 6, 7]
FIELDS = (4, 2, 1)
"""The widths of fields, the lowest bits first."""


def pack(values: Tensor, bits: Width) -> Tensor:
    """Flat bytes with `8 / bits` signed integers each, the first in the lowest bits; the last byte is padded with
    zeros. Widths that do not divide 8 are packed field by field.
    """
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    flat = values.reshape(-1)
    if not flat.numel():
        return torch.empty(0, dtype=torch.uint8)
    least, most = (int(end) for end in torch.aminmax(flat))
    if not (low <= least and most <= high):
        raise DataError(
            f"values {least}..{most} do not fit in {bits} bits",
            advice=f"quantize to {low}..{high} first",
        )
    levels = flat.to(torch.int8).view(torch.uint8)
    packed = [_pack_field(levels >> shift, width) for width, shift in _fields(bits)]
    return packed[0] if len(packed) == 1 else torch.cat(packed)


def unpack(packed: Tensor, bits: Width, shape: torch.Size) -> Tensor:
    """Inverse of `pack`: int8 in the original shape."""
    total = shape.numel()
    lengths = [-(-total * width // 8) for width, _ in _fields(bits)]
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() != sum(lengths):
        raise DataError(
            f"{total} integers of {bits} bits are {sum(lengths)} bytes, not {list(packed.shape)} {packed.dtype}",
            advice="give the tensor that `pack` made, and the shape it was made from",
        )
    levels = torch.zeros(0, dtype=torch.uint8)
    for part, (width, shift) in zip(torch.split(packed, lengths), _fields(bits), strict=True):
        field = _unpack_field(part, width)[:total]
        levels = field if shift == 0 else levels | (field << shift)
    sign = 1 << (bits - 1)
    return (levels ^ sign).view(torch.int8).sub_(sign).reshape(shape)


def _fields(bits: int) -> Iterator[tuple[int, int]]:
    """The widths that add up to one, and at which bit each begins."""
    shift = 0
    for width in FIELDS:
        if bits & width:
            yield width, shift
            shift += width


def _pack_field(levels: Tensor, width: int) -> Tensor:
    count = 8 // width
    levels = levels & ((1 << width) - 1)
    if levels.numel() % count:
        levels = torch.nn.functional.pad(levels, (0, -levels.numel() % count))
    columns = levels.reshape(-1, count)
    packed = columns[:, 0].clone()
    for index in range(1, count):
        packed |= columns[:, index] << (width * index)
    return packed


def _unpack_field(packed: Tensor, width: int) -> Tensor:
    """Unsigned levels, those that filled up the last byte included."""
    count = 8 // width
    levels = torch.empty(packed.numel(), count, dtype=torch.uint8)
    for index in range(count):
        levels[:, index] = (packed >> (width * index)) & ((1 << width) - 1)
    return levels.reshape(-1)
