"""Which two products of a channel an instruction adds in 16 bits, before they reach the accumulator.

`vpmaddubsw` multiplies bytes that lie side by side, and adds the two products. Kernels lay weights out so that
neighbouring input channels of one tap lie so, from an even one on. Kernels that lay all of a channel's weights in one
row, tap by tap, come to the same where there is an even number of input channels; where it is odd, pairs reach from one
tap into the next. A depthwise convolution has one input channel: there taps are paired. tests/integer/proof/test_pair_sums.py finds
out, from each kernel, which pairs saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adjacent(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The weights of all pairs that may be added, the first ones and the second ones: `[output channel, pair]`.

    `weights` are as `bounds.by_channel` has them: `[output channel, input channel, tap]`.
    """
    outputs, inputs, taps = weights.shape
    even = weights[:, : inputs // 2 * 2].reshape(outputs, inputs // 2, 2, taps)
    firsts, seconds = [even[:, :, 0].flatten(1)], [even[:, :, 1].flatten(1)]
    if inputs % 2 and taps > 1:
        row = weights.transpose(1, 2).flatten(1)
        half = row.shape[1] // 2
        row = row[:, : 2 * half].reshape(outputs, half, 2)
        firsts.append(row[..., 0])
        seconds.append(row[..., 1])
    return torch.cat(firsts, dim=1), torch.cat(seconds, dim=1)
