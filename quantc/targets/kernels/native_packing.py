"""Weights as quantc's own kernels read them: blocks of 64 outputs, the last one rounded up to 16; and back, bit for bit.

`native/linear_w8.cpp` and `native/linear_w4.cpp` say how a block lies in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK, LANES = 64, 16
NIBBLES = 8
"""Nibbles of a word."""
SHIFT = 8
"""What is added to a level of four bits."""


def widths(outputs: int) -> list[tuple[int, int]]:
    """Number of blocks, and outputs in each: those of 64, and the last."""
    whole, left = divmod(outputs, BLOCK)
    found = [(whole, BLOCK)] if whole else []
    return [*found, (1, -(-left // LANES) * LANES)] if left else found


def blocks(rows: Tensor) -> list[Tensor]:
    """Rows of a matrix in blocks × outputs × columns, filled up with zeros."""
    found, first = [], 0
    for count, width in widths(len(rows)):
        part = rows[first : first + count * width]
        missing = count * width - len(part)
        part = torch.cat([part, part.new_zeros([missing, rows.shape[1]])]) if missing else part
        found.append(part.reshape(count, width, -1))
        first += count * width
    return found


def from_blocks(parts: Sequence[Tensor], outputs: int) -> Tensor:
    """The rows again."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])[:outputs]


def padded(values: Tensor | None) -> Tensor | None:
    """Numbers by output as float32, for all lanes."""
    if values is None:
        return None
    return torch.cat([values.float(), values.new_zeros(-len(values) % LANES, dtype=torch.float32)])


def packed_bytes(rows: Tensor) -> Tensor:
    """Levels of 8 bits, packed."""
    return torch.cat([part.transpose(1, 2).reshape(-1) for part in blocks(rows)]).view(torch.uint8)


def unpacked_bytes(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    parts, first = [], 0
    for count, width in widths(outputs):
        size = count * width * inputs
        parts.append(packed[first : first + size].view(torch.int8).reshape(count, inputs, width).transpose(1, 2))
        first += size
    return from_blocks(parts, outputs)


@dataclass(frozen=True)
class Grouped:
    """Levels of 4 bits with a scale, and perhaps a zero point, for each group of a row."""

    levels: Tensor
    scale: Tensor
    zero_point: Tensor | None

    @property
    def group(self) -> int:
        return self.levels.shape[1] // self.scale.shape[1]

    @property
    def is_short(self) -> bool:
        """True if bfloat16 represents all scales."""
        return torch.equal(self.scale.bfloat16().float(), self.scale)


def packed_groups(weight: Grouped) -> Tensor:
    """Groups of 4-bit levels, packed."""
    scales = blocks(weight.scale.bfloat16() if weight.is_short else weight.scale)
    zeros = None if weight.zero_point is None else blocks((weight.zero_point + SHIFT).to(torch.int8))
    made = []
    for index, (levels, scale) in enumerate(zip(blocks(weight.levels), scales, strict=True)):
        count, width, groups = scale.shape
        nibbles = (
            (levels + SHIFT).to(torch.uint8).reshape(count, width, groups, weight.group // NIBBLES, NIBBLES // 2, 2)
        )
        pairs = nibbles[..., 0] | (nibbles[..., 1] << 4)
        parts = [_by_group(scale), *([] if zeros is None else [_by_group(zeros[index])])]
        parts.append(pairs.permute(0, 2, 3, 1, 4).reshape(count, groups, -1))
        made.append(torch.cat(parts, -1).reshape(-1))
    return torch.cat(made)


def unpacked_groups(
    packed: Tensor, outputs: int, inputs: int, group: int, has_zero: bool, is_short: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Levels, scales in float32, and zero points in bytes."""
    wide, groups = (torch.bfloat16 if is_short else torch.float32), inputs // group
    levels: list[Tensor] = []
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    first = 0
    for count, width in widths(outputs):
        sizes = [width * wide.itemsize, width if has_zero else 0, width * group // 2]
        part = packed[first : first + count * groups * sum(sizes)].reshape(count, groups, -1)
        first += part.numel()
        scale, zero, words = torch.split(part, sizes, -1)
        scales.append(scale.contiguous().view(wide).transpose(1, 2))
        zeros.append(zero.contiguous().view(torch.int8).transpose(1, 2))
        pairs = words.reshape(count, groups, group // NIBBLES, width, NIBBLES // 2)
        nibbles = torch.stack([pairs & 15, pairs >> 4], -1).permute(0, 3, 1, 2, 4, 5)
        levels.append((nibbles.to(torch.int8) - SHIFT).reshape(count, width, inputs))
    zero_point = from_blocks(zeros, outputs) - SHIFT if has_zero else None
    return from_blocks(levels, outputs), from_blocks(scales, outputs).float(), zero_point


def _by_group(values: Tensor) -> Tensor:
    """Values by block, output and group as bytes, by block and group."""
    count, _, groups = values.shape
    return values.transpose(1, 2).contiguous().view(torch.uint8).reshape(count, groups, -1)
