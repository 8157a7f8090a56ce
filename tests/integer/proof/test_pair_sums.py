"""Which pairs of products saturate on this processor, found out from torch's kernels; none but those we say may."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quantc.integer.proof.bounds import by_channel
from quantc.integer.proof.pair_sums import adjacent
from quantc.targets.kernels.packing import engine
from quantc.targets.kernels.saturation import adds_in_16_bits

LARGEST = 127
MAX_PAIRS = 1500
"""Beyond it pairs are drawn: all that are near each other, and some others."""

pytestmark = pytest.mark.skipif(
    not adds_in_16_bits(), reason="this processor adds products of bytes in 32 bits at once"
)


def onednn_linear(x: Tensor, w: Tensor) -> Tensor:
    packed = torch.ops.onednn.qlinear_prepack(w, None)
    count = w.shape[0]
    zeros = torch.zeros(count, dtype=torch.int32)
    rest: tuple[Any, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
    found: Tensor = torch.ops.onednn.qlinear_pointwise(x, 1.0, 0, packed, torch.ones(count), zeros, *rest)
    return found


def fbgemm_linear(x: Tensor, w: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with engine("fbgemm"):
            packed = torch.ops.quantized.linear_prepack(as_weight(w, 1.0), None)
    run = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    found: Tensor = run(x.float(), 1.0, 0, packed)
    return found


def as_weight(w: Tensor, scale: float) -> Any:
    make: Any = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
    scales = torch.full((w.shape[0],), scale, dtype=torch.float64)
    return make(w, scales, torch.zeros(w.shape[0], dtype=torch.int64), 0)


def onednn_conv(x: Tensor, w: Tensor, groups: int) -> Tensor:
    axes, count = w.dim() - 2, w.shape[0]
    window = ([1] * axes, [0] * axes, [1] * axes, groups)
    packed = torch.ops.onednn.qconv_prepack(w, torch.ones(count), 1.0, 0, *window, None)
    zeros = torch.zeros(count, dtype=torch.int32)
    rest: tuple[Any, ...] = (*window, 1.0, 0, torch.float32, "none", [], "")
    found: Tensor = torch.ops.onednn.qconv_pointwise(x, 1.0, 0, packed, torch.ones(count), zeros, None, *rest)
    return found


def fbgemm_conv(x: Tensor, w: Tensor, groups: int) -> Tensor:
    """In steps of 1024: what comes out are bytes."""
    axes = w.dim() - 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with engine("fbgemm"):
            prepack = getattr(torch.ops.quantized, f"conv{axes}d_prepack")
            packed = prepack(as_weight(w, 1 / 1024), None, [1] * axes, [0] * axes, [1] * axes, groups)
        given = torch._make_per_tensor_quantized_tensor(x, 1.0, 0)  # pyright: ignore[reportPrivateImportUsage]
        found: Tensor = getattr(torch.ops.quantized, f"conv{axes}d")(given, packed, 1.0, 0).int_repr()
    return found


def drawn(shape: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of places in a weight of one channel, `[input channel, *taps]`."""
    places = list(itertools.product(*(range(size) for size in shape)))
    pairs = list(itertools.combinations(range(len(places)), 2))
    if len(pairs) <= MAX_PAIRS:
        return pairs
    near = [(a, b) for a, b in pairs if abs(a - b) < 3 or places[a][1:] == places[b][1:]]
    return [*random.Random(0).sample(pairs, MAX_PAIRS), *near]


def said(shape: Sequence[int]) -> set[tuple[int, int]]:
    """The pairs that we say are added."""
    count = torch.Size(shape).numel()
    numbers = torch.arange(count).reshape(1, *shape)
    firsts, seconds = adjacent(by_channel(numbers if numbers.dim() > 2 else numbers.reshape(1, count)))
    return {(min(a, b), max(a, b)) for a, b in zip(firsts[0].tolist(), seconds[0].tolist(), strict=True)}


def weights_with(pairs: list[tuple[int, int]], shape: Sequence[int]) -> Tensor:
    """A channel for each pair: the largest weight at two places, and zeros."""
    w = torch.zeros(len(pairs), torch.Size(shape).numel(), dtype=torch.int8)
    for row, (one, other) in zip(w, pairs, strict=True):
        row[one] = row[other] = LARGEST
    return w.reshape(len(pairs), *shape)


@pytest.mark.parametrize("multiply", [onednn_linear, fbgemm_linear])
@pytest.mark.parametrize("columns", [4, 7, 33, 64])
@pytest.mark.parametrize("rows", [1, 2, 17, 130])
def test_linear(multiply: Any, columns: int, rows: int) -> None:
    pairs = drawn([columns])
    x = torch.full((rows, columns), 255, dtype=torch.uint8)
    wrong = (multiply(x, weights_with(pairs, [columns])) != 255 * 2 * LARGEST).any(0)
    saturated = {pair for pair, is_wrong in zip(pairs, wrong.tolist(), strict=True) if is_wrong}
    assert saturated == said([columns])


CONVOLUTIONS = [  # axes, input channels, groups, kernel, size
    (2, 16, 1, 1, 5), (2, 64, 1, 1, 14), (2, 16, 1, 3, 8), (2, 6, 1, 3, 8), (2, 3, 1, 3, 20), (2, 3, 1, 7, 20),
    (2, 5, 1, 3, 8), (2, 8, 1, 5, 9), (2, 32, 1, 3, 30), (2, 32, 32, 3, 8), (2, 24, 24, 3, 8), (2, 64, 64, 5, 9),
    (2, 16, 4, 3, 8), (2, 32, 4, 3, 8), (2, 64, 4, 3, 8), (2, 8, 4, 3, 8), (2, 9, 3, 3, 8), (2, 12, 4, 3, 8),
    (1, 16, 1, 3, 20), (1, 7, 1, 3, 20), (1, 16, 16, 3, 20), (3, 8, 1, 2, 6), (3, 3, 1, 3, 6), (3, 32, 32, 3, 6),
]  # fmt: skip


@pytest.mark.parametrize("family", ["onednn", "fbgemm"])
@pytest.mark.parametrize(("axes", "channels", "groups", "kernel", "size"), CONVOLUTIONS)
def test_conv(family: str, axes: int, channels: int, groups: int, kernel: int, size: int) -> None:
    shape = [channels // groups, *[kernel] * axes]
    pairs = drawn(shape)
    # one output channel a group where kernels are made for that; elsewhere as many as there are pairs
    at_once = channels // groups if groups > 1 else len(pairs)
    x = torch.full((1, channels, *[size] * axes), 255, dtype=torch.uint8)
    x = x.contiguous(
        memory_format={2: torch.channels_last, 3: torch.channels_last_3d}.get(axes, torch.contiguous_format)
    )
    saturated: set[tuple[int, int]] = set()
    for chunk in chunks(pairs, at_once):
        full = [*chunk, *[chunk[0]] * (at_once - len(chunk))]
        w = weights_with(full, shape).repeat(groups, *[1] * (axes + 1))
        made = onednn_conv(x, w, groups) if family == "onednn" else fbgemm_conv(x, w, groups)
        right = 255 * 2 * LARGEST if family == "onednn" else 255 * 2 * LARGEST // 1024
        wrong = (made != right).transpose(0, 1).flatten(1).any(1).reshape(groups, at_once).any(0)
        saturated |= {pair for pair, is_wrong in zip(full, wrong.tolist(), strict=True) if is_wrong}
    assert saturated <= said(shape)
    assert saturated or (family == "onednn" and groups > 1) or not said(shape), "the probe finds nothing"


def chunks(pairs: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    return [pairs[start : start + size] for start in range(0, len(pairs), size)]
