"""What sums of products can come to, whatever the activations are: exact bounds from the integers of the weights.

Weights are looked at as `[output channel, input channel, tap]`, whatever the op: `by_channel` brings them there. Every
product may also be missing from a sum, as it is where a convolution reaches over the edge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["rows", "columns", "transposed"]
"""Where a weight has its output channels: "rows" on its first axis (linear, convolutions), "columns" on its last
(the second operand of a matrix product), "transposed" on its second, for each group anew (transposed convolutions)."""

FLOAT32_EXACT = 2**24
"""Below it every integer is a float32."""


@dataclass(frozen=True, eq=False)
class Reach:
    """The smallest and the largest value that sums can have: int64, one element for each output channel."""

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
        """How many bits hold all of them, with the sign."""
        return max(bits_of(self.lowest), bits_of(self.highest))

    @property
    def fits_int32(self) -> bool:
        return self.bits <= 32

    def beyond(self, bits: int) -> Tensor:
        """Which channels can leave the range of so many bits."""
        return torch.logical_or(self.low < -(2 ** (bits - 1)), self.high >= 2 ** (bits - 1))


def bits_of(value: int) -> int:
    """How many bits hold an integer in two's complement."""
    return (value if value >= 0 else ~value).bit_length() + 1


def by_channel(w: Tensor, layout: Layout = "rows", groups: int = 1) -> Tensor:
    """A weight as `[output channel, input channel, tap]`; the input channels are those of one group.

    Integers become int64; floats stay what they are.
    """
    w = w if w.is_floating_point() else w.to(torch.int64)
    if layout == "rows":
        return w.reshape(w.shape[0], w.shape[1], math.prod(w.shape[2:]))
    if layout == "columns":
        return w.transpose(-1, -2).reshape(-1, w.shape[-2], 1)
    inputs, outputs, taps = w.shape[0] // groups, w.shape[1], math.prod(w.shape[2:])
    return w.reshape(groups, inputs, outputs, taps).transpose(1, 2).reshape(groups * outputs, inputs, taps)


def centered_by_channel(w: Tensor, zero_point: Tensor | None, layout: Layout = "rows", groups: int = 1) -> Tensor:
    """`wq - wz` as `by_channel` has it; the zero point is one for all, or one for each output channel."""
    wide = by_channel(w, layout, groups)
    return wide if zero_point is None else wide - zero_point.to(torch.int64).reshape(-1, 1, 1)


def sum_reach(weights: Tensor, x_low: int, x_high: int, bias: Tensor | None = None) -> Reach:
    """What accumulators can hold: `weights` as `by_channel` gives them, less their zero point; activations, less
    theirs, from `x_low` to `x_high`; the bias in steps of the accumulator.

    The bias may come first or last and the products in any order: no sum on the way leaves the bounds either.
    """
    low, high = min(x_low, 0), max(x_high, 0)
    above = weights.clamp(min=0).sum(dim=(1, 2))
    below = weights.sum(dim=(1, 2)) - above
    total = Reach(above * low + below * high, above * high + below * low)
    if bias is None:
        return total
    step = bias.to(torch.int64)
    return Reach(torch.minimum(total.low, total.low + step), torch.maximum(total.high, total.high + step))


def pair_reach(weights: Tensor, x_low: int, x_high: int) -> Reach:
    """What the sum of any two products of a channel can be, as neighbours are added before they are accumulated.

    Which two are neighbours depends on how a kernel lays its weights out, so any two count. Weights and activations
    are the integers that are multiplied: no zero point is taken off.
    """
    one, other = weights.flatten(1) * x_low, weights.flatten(1) * x_high
    low, high = torch.minimum(one, other).clamp(max=0), torch.maximum(one, other).clamp(min=0)
    most = min(2, high.shape[1])
    return Reach(-(-low).topk(most, dim=1).values.sum(dim=1), high.topk(most, dim=1).values.sum(dim=1))


def decisive(weights: Tensor) -> Tensor:
    """The two largest and the two smallest weights of each channel: no other two make a larger or a smaller sum."""
    flat = weights.flatten(1)
    if flat.shape[1] > 4:
        flat = torch.cat((flat.topk(2, dim=1).values, flat.topk(2, dim=1, largest=False).values), dim=1)
    return flat.unsqueeze(-1)


def range_reach(count: int, x: tuple[int, int], y: tuple[int, int]) -> Reach:
    """What a sum of `count` products can come to, of factors of which the ranges alone are known."""
    corners = [0, *(a * b for a in x for b in y)]
    return Reach(torch.tensor([count * min(corners)]), torch.tensor([count * max(corners)]))


def exact_in_float32_parts(weights: Tensor, x_low: int, x_high: int) -> int:
    """Into how many parts the input channels must go, at least, for sums in float32 to be exact in each; 0 if none do.

    In a part max|x| · Σ|w| stays below 2^24 for every output channel, so that no sum on the way is rounded, in
    whatever order. `weights`, `x_low` and `x_high` are as in `sum_reach`. Which channels are in which part says
    `parts_of`.
    """
    farthest = max(abs(x_low), abs(x_high))
    mass = weights.abs().sum(dim=2) * farthest
    inputs = mass.shape[1]
    if not mass.numel():
        return 1
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
    """First and last-but-one channel of each part: all of the same size, but the last may be smaller."""
    size = -(-inputs // max(parts, 1))
    for start in range(0, inputs, max(size, 1)):
        yield start, min(start + size, inputs)
