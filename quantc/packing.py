"""Integers narrower than a byte, several to a byte: the form they are saved in."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from quantc.errors import DataError

Width = Literal[2, 4]


def pack(values: Tensor, bits: Width) -> Tensor:
    """Flat bytes with `8 / bits` signed integers each, the first in the lowest bits; the last byte is filled up
    with zeros."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    flat = values.reshape(-1).to(torch.int16)
    if flat.numel() and not (low <= int(flat.min()) and int(flat.max()) <= high):
        raise DataError(
            f"values {int(flat.min())}..{int(flat.max())} do not fit in {bits} bits",
            advice=f"quantize to {low}..{high} first",
        )
    count = 8 // bits
    flat = torch.nn.functional.pad(flat & ((1 << bits) - 1), (0, -flat.numel() % count)).reshape(-1, count)
    shifts = torch.arange(0, 8, bits, dtype=torch.int16)
    return (flat << shifts).sum(1).to(torch.uint8)


def unpack(packed: Tensor, bits: Width, shape: torch.Size) -> Tensor:
    """What `pack` packed, as int8 in the shape it had."""
    count, total = 8 // bits, shape.numel()
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() != -(-total // count):
        raise DataError(
            f"{total} integers of {bits} bits are {-(-total // count)} bytes, not {list(packed.shape)} {packed.dtype}",
            advice="give the tensor that `pack` made, and the shape it was made from",
        )
    shifts = torch.arange(0, 8, bits, dtype=torch.int16)
    levels = (packed.to(torch.int16).unsqueeze(1) >> shifts) & ((1 << bits) - 1)
    sign = 1 << (bits - 1)
    return ((levels ^ sign) - sign).reshape(-1)[:total].to(torch.int8).reshape(shape)
