"""Histogram buckets by the top bits of a float32: sign, exponent and six bits of mantissa.

There is no range to choose, the relative resolution is 1.6 % at every magnitude, and finding a bucket is a shift. Index
0 is -0.0, going up in magnitude to minus infinity at the middle; the other half is the same for positive numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]

MANTISSA_BITS = 6
SHIFT = 23 - MANTISSA_BITS
HALF = 1 << (8 + MANTISSA_BITS)
"""The number of buckets of each sign."""
BUCKETS = 2 * HALF
FINITE = 255 << MANTISSA_BITS
"""Magnitude buckets from here on hold infinity and NaN."""
NORMAL = 1 << MANTISSA_BITS
"""Magnitude buckets below here hold zero and subnormals."""
CHUNK = 1 << 18
"""Elements processed at a time: their buckets stay in the cache."""


def bucket_of(x: Tensor) -> Tensor:
    """The bucket of each element of a float32 tensor, as int32."""
    return (x.view(torch.int32) >> SHIFT) + HALF


def count_buckets(flat: Tensor, *, is_positive: bool) -> tuple[Tensor, Tensor]:
    """The non-empty buckets of float32 numbers, in ascending order, and their counts.

    `is_positive` promises that no number is below zero, as after a relu, and saves a third of the time.
    """
    total = _count_positive(flat) if is_positive else None
    first = HALF
    if total is None:
        first, total = 0, _count(flat, bucket_of, BUCKETS)
    hit = torch.nonzero(total).reshape(-1)
    return hit + first, total[hit]


def _count_positive(flat: Tensor) -> Tensor | None:
    """The counts of the upper half of the buckets; None if there is a -0.0, which lies in the lower half."""
    try:
        return _count(flat, lambda part: part.view(torch.int32) >> SHIFT, HALF)
    except RuntimeError:  # torch.bincount raises on negative indices
        return None


def _count(flat: Tensor, index: Callable[[Tensor], Tensor], buckets: int) -> Tensor:
    total = torch.bincount(index(flat[:CHUNK]), minlength=buckets)
    for begin in range(CHUNK, len(flat), CHUNK):
        total += torch.bincount(index(flat[begin : begin + CHUNK]), minlength=buckets)
    return total


def is_finite_bucket(buckets: Tensor) -> Tensor:
    """Mask of the buckets that hold finite numbers."""
    return _magnitude_index(buckets) < FINITE


def _magnitude_index(buckets: Tensor) -> Tensor:
    # the shift keeps the sign, so negative numbers fill the lower half: -0.0 is 0, and 0.0 is HALF
    return buckets % HALF


@cache
def edges() -> Floats:
    """The lower magnitude of each bucket of a sign; one more entry than there are finite buckets."""
    bits = np.arange(FINITE, dtype=np.uint32) << SHIFT
    return np.append(bits.view(np.float32).astype(np.float64), 2.0**128)


@dataclass(frozen=True)
class Cells:
    """A histogram ready for range search: left and right edge of each non-empty cell, in ascending order, and its
    count. The outermost cells end at the exact extremes of the data."""

    left: Floats
    right: Floats
    mass: Floats
    is_tiny: NDArray[np.bool_]
    """True for zero and subnormals."""

    def only(self, which: NDArray[np.bool_]) -> Cells:
        """The cells selected by a mask."""
        return Cells(self.left[which], self.right[which], self.mass[which], self.is_tiny[which])

    @property
    def low(self) -> float:
        return float(self.left[0])

    @property
    def high(self) -> float:
        return float(self.right[-1])

    @property
    def middle(self) -> Floats:
        return (self.left + self.right) / 2

    @property
    def magnitude(self) -> Floats:
        return np.abs(self.middle)


def cells_of(columns: Tensor, counts: Tensor, low: float, high: float) -> Cells:
    """The cells of one row of a histogram: counts of the given buckets, and the exact extremes."""
    used = torch.nonzero(counts).reshape(-1)
    index = columns[used].numpy()
    mass = counts[used].double().numpy()
    magnitude = index % HALF
    is_negative = index < HALF
    begin, end = edges()[magnitude], edges()[magnitude + 1]
    left, right = np.where(is_negative, -end, begin), np.where(is_negative, -begin, end)
    order = np.lexsort((right, left))
    left, right = np.clip(left[order], low, high), np.clip(right[order], low, high)
    return Cells(left, right, mass[order], magnitude[order] < NORMAL)
