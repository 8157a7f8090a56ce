"""Integer sums over axes, windows and spans, accumulated exactly in int32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.integer.library import OPS, OUT, integer_op
from quantc.spec.aten_arithmetic import aten, center, rescale

SUM_OF_ALL = "acc = Σ (xq − xz) in int32; out = clamp(round(acc · M) + zo); M = sx / so"
AVERAGED = SUM_OF_ALL.replace("sx / so", "sx / (so·n)") + ", n the number of places that count; padding adds 0"


@integer_op(
    f"sum_over(Tensor x, int x_zero_point, int[] dims, bool keepdim, {OUT}) -> Tensor",
    formula=SUM_OF_ALL,
)
def sum_over(x: Tensor, x_zero_point: int, dims: Sequence[int], keepdim: bool, *out: Any) -> Tensor:
    """Sums over whole axes."""
    return rescale(_sum(center(x, x_zero_point), dims, keepdim), *out)


@integer_op(
    f"sum_windows(Tensor x, int x_zero_point, int[] kernel, int[] stride, int[] padding, {OUT}) -> Tensor",
    formula=SUM_OF_ALL,
)
def sum_windows(
    x: Tensor, x_zero_point: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], *out: Any
) -> Tensor:
    """Sums over windows that slide along the last axes.

    `padding` has two numbers per axis, the first axis first: before and after it. Negative padding crops.
    """
    rank = len(kernel)
    # ATen wants the last axis first
    pairs = [edge for axis in reversed(range(rank)) for edge in padding[2 * axis : 2 * axis + 2]]
    acc: Tensor = center(x, x_zero_point)
    if any(pairs):
        acc = aten.constant_pad_nd.default(acc, pairs, 0)
    for axis in range(rank):
        dim = x.dim() - rank + axis
        acc = _sum(aten.unfold.default(acc, dim, kernel[axis], stride[axis]), [x.dim()], False)
    return rescale(acc, *out)


@integer_op(
    f"sum_spans(Tensor x, int x_zero_point, Tensor[] starts, Tensor[] ends, {OUT}) -> Tensor",
    formula=SUM_OF_ALL,
)
def sum_spans(x: Tensor, x_zero_point: int, starts: Sequence[Tensor], ends: Sequence[Tensor], *out: Any) -> Tensor:
    """Sums over half-open spans of the last axes: differences of cumulative sums."""
    acc: Tensor = center(x, x_zero_point)
    for axis, (start, end) in enumerate(zip(starts, ends, strict=True)):
        dim = x.dim() - len(starts) + axis
        before = [0] * (2 * (x.dim() - dim))
        before[-2] = 1
        running = aten.constant_pad_nd.default(aten.cumsum.default(acc, dim, dtype=torch.int32), before, 0)
        upto = aten.index_select.default(running, dim, end)
        acc = aten.sub.Tensor(upto, aten.index_select.default(running, dim, start))
    return rescale(acc, *out)


def _sum(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    total: Tensor = aten.sum.dim_IntList(x, list(dims), keepdim, dtype=torch.int32)
    return total


SUM_OVER, SUM_WINDOWS, SUM_SPANS = OPS["sum_over"], OPS["sum_windows"], OPS["sum_spans"]
