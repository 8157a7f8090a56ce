"""Exact bounds of sums of products for any activations, from the integers of the weights.

Weights have the shape `[output channel, input channel, tap]`, whatever the op: `by_channel` reshapes them. Any product
may be missing from a sum, as at the edge of a convolution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from quantc.integer.proof.pair_sums import adjacent
from quantc.spec.instruction_sets import Neighbours

Layout = Literal["rows", "columns", "transposed"]
"""Axis of a weight's output channels: "rows" is its first (linear, convolutions), "columns" its last
(the second operand of a matmul), "transposed" its second, within each group (transposed convolutions)."""

FLOAT32_EXACT = 2**24
"""Below it every integer is a float32."""
DECISIVE = 4
"""Number of weights of a channel that bound the sum of two of its products: two at either end."""
FEW = 8
"""Of so many numbers in a row torch finds the largest quickly."""


@dataclass(frozen=True, eq=False)
class Reach:
    """Minimum and maximum of sums: int64, one element per output channel."""

    low: Tensor
    high: Tensor

    @property
    def lowest(self) -> int:
        return int(self.low.min()) if self.low.numel() else 0

    @property
    def highest(self) -> int:
        return int(self.high.max()) if self.high.numel() else 0

    @property
    def bits(self) -> int:
        """Bits that represent all of them, with sign."""
        return max(bits_of(self.lowest), bits_of(self.highest))

    def beyond(self, bits: int) -> Tensor:
        """Mask of the channels that can exceed `bits` bits."""
        return torch.logical_or(self.low < -(2 ** (bits - 1)), self.high >= 2 ** (bits - 1))


def bits_of(value: int) -> int:
    """Bits of an integer in two's complement."""
    return (value if value >= 0 else ~value).bit_length() + 1


def by_channel(w: Tensor, layout: Layout = "rows", groups: int = 1) -> Tensor:
    """A weight as `[output channel, input channel, tap]`; input channels are per group.

    Its dtype is kept: 8-bit integers are scanned many times as fast as wider ones.
    """
    if layout == "rows":
        return w.reshape(w.shape[0], w.shape[1], math.prod(w.shape[2:]))
    if layout == "columns":
        return w.transpose(-1, -2).reshape(-1, w.shape[-2], 1)
    inputs, outputs, taps = w.shape[0] // groups, w.shape[1], math.prod(w.shape[2:])
    return w.reshape(groups, inputs, outputs, taps).transpose(1, 2).reshape(groups * outputs, inputs, taps)


def centered_by_channel(w: Tensor, zero_point: Tensor | None, layout: Layout = "rows", groups: int = 1) -> Tensor:
    """`wq - wz` in the shape of `by_channel`; the zero point is one for all, or one per output channel."""
    wide = by_channel(w, layout, groups).to(difference_type(w.dtype))
    return wide if zero_point is None else wide - zero_point.to(wide.dtype).reshape(-1, 1, 1)


def difference_type(dtype: torch.dtype) -> torch.dtype:
    """Narrowest dtype that represents every difference of two integers of a dtype, and its absolute value."""
    return torch.int16 if torch.iinfo(dtype).bits == 8 else torch.int64


def sum_reach(weights: Tensor, x_low: int, x_high: int, bias: Tensor | None = None) -> Reach:
    """Bounds of accumulators: `weights` are as from `by_channel`, minus their zero point; activations, minus theirs,
    range from `x_low` to `x_high`; the bias is in steps of the accumulator.

    The bias may come first or last and the products in any order: no partial sum leaves the bounds either.
    """
    low, high = min(x_low, 0), max(x_high, 0)
    above, below = _sums_by_sign(weights.flatten(1))
    total = Reach(above * low + below * high, above * high + below * low)
    if bias is None:
        return total
    step = bias.to(torch.int64)
    return Reach(torch.minimum(total.low, total.low + step), torch.maximum(total.high, total.high + step))


def _sums_by_sign(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the positive and of the negative numbers of each row: exact, in int64."""
    wide = rows.to(torch.float32 if _is_exact_in_float32(rows) else torch.int64)
    total = wide.sum(dim=1)
    above = wide.clamp(min=0).sum(dim=1)
    return above.to(torch.int64), (total - above).to(torch.int64)


def _is_exact_in_float32(rows: Tensor) -> bool:
    """True if every partial sum of a row's numbers is exact in float32."""
    if not rows.numel():
        return True
    farthest = max(abs(int(rows.min())), abs(int(rows.max())))
    return farthest * rows.shape[1] < FLOAT32_EXACT


def pair_reach(weights: Tensor, x_low: int, x_high: int) -> Reach:
    """Bounds of the sum of any two products of a channel, as instructions add adjacent ones before accumulation.

    Any two count: select those that can be adjacent first, with `decisive`. Weights and activations are the integers
    that are multiplied: no zero point is subtracted.
    """
    wide = weights.flatten(1).to(torch.int64)
    one, other = wide * x_low, wide * x_high
    low, high = torch.minimum(one, other).clamp(max=0), torch.maximum(one, other).clamp(min=0)
    return Reach(-_largest_pair(-low), _largest_pair(high))


def _largest_pair(rows: Tensor) -> Tensor:
    """The sum of the two largest numbers of each row, none of which is below zero."""
    if rows.shape[1] > DECISIVE:
        return rows.topk(2, dim=1).values.sum(dim=1)
    # tournament, which is faster: the two largest are both winners, or the winner and the better loser
    left, right = functional.pad(rows, (0, DECISIVE - rows.shape[1])).chunk(2, dim=1)
    won, lost = torch.maximum(left, right), torch.minimum(left, right)
    return torch.maximum(won.sum(dim=1), won.amax(dim=1) + lost.amax(dim=1))


def decisive(weights: Tensor, neighbours: Neighbours = "any") -> Tensor:
    """The two weights of each channel with the largest sum, and the two with the smallest: `pair_reach` of these alone is the same.

    For adjacent pairs they assume non-negative activations; the weight of a pair that has the other sign counts as 0,
    since its product may be missing.
    """
    if neighbours == "adjacent":
        firsts, seconds = adjacent(weights)
        if not firsts.shape[1]:  # one product is no pair, but it too must fit
            return torch.cat((weights.flatten(1), torch.zeros_like(weights.flatten(1))), dim=1).unsqueeze(-1)
        ends = [
            _farthest(firsts.clamp(min=0), seconds.clamp(min=0)),
            _farthest(firsts.clamp(max=0), seconds.clamp(max=0)),
        ]
        return torch.cat(ends, dim=1).unsqueeze(-1)
    flat = weights.flatten(1)
    if flat.shape[1] > DECISIVE:
        # the complement of an integer turns the order round, and unlike its negative it always fits
        turned = torch.neg if flat.is_floating_point() else torch.bitwise_not
        flat = torch.cat((_two_largest(flat), turned(_two_largest(turned(flat)))), dim=1)
    return flat.unsqueeze(-1)


def _farthest(firsts: Tensor, seconds: Tensor) -> Tensor:
    """The pair of each row whose sum is farthest from zero; all numbers are of one sign."""
    wide = torch.int16 if firsts.dtype is torch.int8 else firsts.dtype
    at = (firsts.to(wide) + seconds).abs().argmax(dim=1, keepdim=True)
    return torch.cat((firsts.gather(1, at), seconds.gather(1, at)), dim=1)


def _two_largest(rows: Tensor) -> Tensor:
    """The two largest numbers of each row, the largest first.

    Bytes are compared half against half, many at once: the losers matter by the largest of them alone.
    """
    rest: list[Tensor] = []
    while rows.dtype in (torch.int8, torch.uint8) and rows.shape[1] > FEW:
        half = rows.shape[1] // 2
        left, right = rows[:, :half], rows[:, half : 2 * half]
        rest += [torch.minimum(left, right).amax(dim=1, keepdim=True), rows[:, 2 * half :]]
        rows = torch.maximum(left, right)
    return torch.cat((rows, *rest), dim=1).topk(2, dim=1).values


def range_reach(count: int, x: tuple[int, int], y: tuple[int, int]) -> Reach:
    """Bounds of a sum of `count` products of factors of which only the ranges are known."""
    corners = [0, *(a * b for a in x for b in y)]
    return Reach(torch.tensor([count * min(corners)]), torch.tensor([count * max(corners)]))


def exact_in_float32_parts(weights: Tensor, x_low: int, x_high: int) -> int:
    """Minimum number of parts of the input channels such that float32 sums are exact in each; 0 if there is none.

    In a part max|x| · Σ|w| stays below 2^24 for every output channel, so that no partial sum is rounded, in any order.
    `weights`, `x_low` and `x_high` are as in `sum_reach`. `parts_of` gives the channels of each part.
    """
    if not weights.numel():
        return 1
    farthest = max(abs(x_low), abs(x_high))
    above, below = _sums_by_sign(weights.flatten(1))
    if int((above - below).max()) * farthest < FLOAT32_EXACT:
        return 1
    mass = weights.to(torch.int64).abs().sum(dim=2) * farthest
    inputs = mass.shape[1]
    if int(mass.max()) >= FLOAT32_EXACT:
        return 0
    least = int(mass.sum(dim=1).max()) // FLOAT32_EXACT + 1
    running = torch.nn.functional.pad(mass.cumsum(dim=1), (1, 0))
    for parts in range(least, inputs):
        edges = torch.tensor([0, *(end for _, end in parts_of(inputs, parts))])
        if int(running[:, edges].diff(dim=1).max()) < FLOAT32_EXACT:
            return len(edges) - 1
    return inputs


def parts_of(inputs: int, parts: int) -> Iterator[tuple[int, int]]:
    """Half-open channel range of each part: equal sizes, except that the last may be smaller."""
    size = -(-inputs // max(parts, 1))
    for start in range(0, inputs, max(size, 1)):
        yield start, min(start + size, inputs)
