"""Pairing of products: which two products of a channel an instruction adds in 16 bits before accumulation.

`vpmaddubsw` multiplies adjacent bytes and adds the two products. Kernels lay out weights so that adjacent input
channels of one tap are paired, starting at an even one. Kernels that lay out all of a channel's weights in one row, tap
by tap, pair the same with an even number of input channels; with an odd number, pairs cross from one tap into the next.
A depthwise convolution has one input channel: there taps are paired. tests/integer/proof/test_pair_sums.py determines,
from each kernel, which pairs saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor


def adjacent(weights: Tensor) -> tuple[Tensor, Tensor]:
    """First and second weights of all pairs that may be added: `[output channel, pair]`.

    `weights` have the shape of `bounds.by_channel`: `[output channel, input channel, tap]`.
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
