"""Products: sums of products of integers, accumulated exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.out_dtype import out_dtype

from quantc.integer.arithmetic import aten, centered, rescale
from quantc.integer.library import OUT, integer_op

ACCUMULATOR = "acc = Σ (xq − xz)(wq − wz) + bias_q in int32; bias_q = round(b / (sx·sw))"


def finished(accumulator: Tensor, multiplier: Tensor | None, *out: Any) -> Tensor:
    """The accumulator itself if there is no multiplier, else what `rescale` makes of it."""
    return accumulator if multiplier is None else rescale(accumulator, multiplier, *out)


def _wide_weight(w: Tensor, w_zero_point: Tensor | None, axis: int) -> Tensor:
    if w_zero_point is None:
        return aten.to.dtype(w, torch.int16)
    shape = [-1 if dim == axis else 1 for dim in range(w.dim())] if w_zero_point.dim() else []
    return centered(w, aten.reshape.default(w_zero_point, shape), torch.int16)


PRODUCT_OUT = OUT.replace("Tensor multiplier", "Tensor? multiplier")


@integer_op(
    f"linear(Tensor x, int x_zero_point, Tensor w, Tensor? w_zero_point, Tensor? bias, int parts, {PRODUCT_OUT})"
    " -> Tensor",
    formula=ACCUMULATOR,
)
def linear(
    x: Tensor,
    x_zero_point: int,
    w: Tensor,
    w_zero_point: Tensor | None,
    bias: Tensor | None,
    parts: int,
    *out: Any,
) -> Tensor:
    """A matrix product with the weight's rows, on the last axis."""
    rows = aten.reshape.default(centered(x, x_zero_point, torch.int16), [-1, x.shape[-1]])
    columns = aten.transpose.int(_wide_weight(w, w_zero_point, 0), 0, 1)
    acc = out_dtype(aten.mm.default, torch.int32, rows, columns)
    acc = aten.reshape.default(acc, [*x.shape[:-1], w.shape[0]])
    return finished(acc if bias is None else aten.add.Tensor(acc, bias), *out)


@integer_op(
    "conv(Tensor x, int x_zero_point, Tensor w, Tensor? w_zero_point, Tensor? bias, int[] stride, int[] padding, "
    f"int[] dilation, int groups, int parts, {PRODUCT_OUT}) -> Tensor",
    formula=ACCUMULATOR,
)
def conv(
    x: Tensor,
    x_zero_point: int,
    w: Tensor,
    w_zero_point: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    parts: int,
    *out: Any,
) -> Tensor:
    """A convolution over one, two or three axes."""
    wide = _wide_weight(w, w_zero_point, 0)
    rank = len(stride)
    args = (list(stride), list(padding), list(dilation), False, [0] * rank, groups)
    acc = out_dtype(aten.convolution.default, torch.int32, centered(x, x_zero_point, torch.int16), wide, None, *args)
    if bias is not None:
        acc = aten.add.Tensor(acc, aten.reshape.default(bias, [-1, *[1] * rank]))
    return finished(acc, *out)
