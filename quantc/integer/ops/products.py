"""Integer GEMMs and convolutions, accumulated exactly.

`parts` tells kernels the number of parts into which input channels may be split so that each partial sum is exact in
float32; 0 if unknown. It never changes the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.out_dtype import out_dtype

from quantc.integer.library import OUT, integer_op
from quantc.integer.ops import product_kernels
from quantc.spec.aten_arithmetic import aten, center, rescale

ACCUMULATOR = "acc = Σ (xq − xz)(wq − wz) + bias_q in int32; bias_q = round(b / (sx·sw))"
PRODUCT_OUT = OUT.replace("Tensor multiplier", "Tensor? multiplier")
"""Without a multiplier the result is the accumulator."""
BYTES = (torch.int8, torch.uint8)


@integer_op(
    f"linear(Tensor x, int x_zero_point, Tensor w, Tensor? w_zero_point, Tensor? bias, int parts, {PRODUCT_OUT})"
    " -> Tensor",
    formula=ACCUMULATOR,
    kernel=product_kernels.linear,
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
    """GEMM with the weight's rows, on the last axis."""
    room = _room(x, w)
    columns = aten.transpose.int(_centered_factor(w, w_zero_point, 0, room), 0, 1)
    acc = _with_columns(center(x, x_zero_point, room), columns)
    return _finish(acc, bias, 0, *out)


@integer_op(
    f"matmul(Tensor x, int x_zero_point, Tensor y, Tensor? y_zero_point, Tensor? bias, int parts, {PRODUCT_OUT})"
    " -> Tensor",
    formula=ACCUMULATOR.replace("w", "y"),
    kernel=product_kernels.matmul,
)
def matmul(
    x: Tensor,
    x_zero_point: int,
    y: Tensor,
    y_zero_point: Tensor | None,
    bias: Tensor | None,
    parts: int,
    *out: Any,
) -> Tensor:
    """(Batched) matmul on the last two axes, with broadcasting and vectors as in torch."""
    room = _room(x, y)
    left = center(x, x_zero_point, room)
    right = _centered_factor(y, y_zero_point, y.dim() - 1, room)
    if x.dim() == 1:
        left = aten.unsqueeze.default(left, 0)
    if y.dim() == 1:
        right = aten.unsqueeze.default(right, 1)
    acc = _with_columns(left, right) if y.dim() <= 2 else _in_batches(left, right)
    if y.dim() == 1:
        acc = aten.squeeze.dim(acc, -1)
    if x.dim() == 1:
        acc = aten.squeeze.dim(acc, -1 if y.dim() == 1 else -2)
    return _finish(acc, bias, 0, *out)


@integer_op(
    "conv(Tensor x, int x_zero_point, Tensor w, Tensor? w_zero_point, Tensor? bias, int[] stride, int[] padding, "
    f"int[] dilation, int groups, int parts, {PRODUCT_OUT}) -> Tensor",
    formula=ACCUMULATOR,
    kernel=product_kernels.conv,
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
    """Convolution over one, two or three axes; padding is the real number 0.

    ATen has no dilated convolution of integers below 64 bits: the weight gets zeros between its taps.
    """
    room = _room(x, w)
    wide = _insert_zeros(_centered_factor(w, w_zero_point, 0, room), dilation)
    acc = _convolve(center(x, x_zero_point, room), wide, stride, padding, groups)
    return _finish(acc, bias, len(stride), *out)


@integer_op(
    "conv_transpose(Tensor x, int x_zero_point, Tensor w, Tensor? w_zero_point, Tensor? bias, int[] stride, "
    f"int[] padding, int[] output_padding, int groups, int[] dilation, int parts, {PRODUCT_OUT}) -> Tensor",
    formula=f"{ACCUMULATOR}; x with zeros between its elements, w turned about and its channels exchanged",
    kernel=product_kernels.conv_transpose,
)
def conv_transpose(
    x: Tensor,
    x_zero_point: int,
    w: Tensor,
    w_zero_point: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    parts: int,
    *out: Any,
) -> Tensor:
    """Transposed convolution over one, two or three axes.

    ATen has none for integers below 64 bits: it is a convolution of the input with zeros between its elements.
    """
    room, rank = _room(x, w), len(stride)
    turned = _insert_zeros(_flip_taps(_centered_factor(w, w_zero_point, 1, room), groups), dilation)
    around: list[int] = []
    for axis in reversed(range(rank)):
        reach = turned.shape[2 + axis] - 1 - padding[axis]
        around += [reach, reach + output_padding[axis]]
    spread = aten.constant_pad_nd.default(_insert_zeros(center(x, x_zero_point, room), stride), around)
    acc = _convolve(spread, turned, [1] * rank, [0] * rank, groups)
    return _finish(acc, bias, rank, *out)


# -- what they are made of -----------------------------------------------------------------------------------------


def _room(x: Tensor, w: Tensor) -> torch.dtype:
    """A type that holds the factors, less their zero points."""
    return torch.int16 if x.dtype in BYTES and w.dtype in BYTES else torch.int32


def _centered_factor(w: Tensor, zero_point: Tensor | None, axis: int, dtype: torch.dtype) -> Tensor:
    """The second factor less its zero point, of which there is one, or one for each channel along an axis."""
    if zero_point is None:
        wide: Tensor = aten.to.dtype(w, dtype)
        return wide
    shape = [-1 if dim == axis else 1 for dim in range(w.dim())] if zero_point.dim() else []
    return center(w, aten.reshape.default(zero_point, shape), dtype)


def _with_columns(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, of which the second is one matrix."""
    rows = aten.reshape.default(left, [math.prod(left.shape[:-1]), left.shape[-1]])
    sums = out_dtype(aten.mm.default, torch.int32, rows, right)
    acc: Tensor = aten.reshape.default(sums, [*left.shape[:-1], right.shape[1]])
    return acc


def _in_batches(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` of batches of matrices; `out_dtype` has no such product, so the factors are int32 already."""
    batch = _broadcast(left.shape[:-2], right.shape[:-2])
    count = math.prod(batch)
    factors = []
    for factor in (left, right):
        whole = aten.expand.default(aten.to.dtype(factor, torch.int32), [*batch, *factor.shape[-2:]])
        factors.append(aten.reshape.default(whole, [count, *factor.shape[-2:]]))
    acc: Tensor = aten.reshape.default(aten.bmm.default(*factors), [*batch, left.shape[-2], right.shape[-1]])
    return acc


def _broadcast(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The shape that two shapes are broadcast to."""
    rank = max(len(one), len(other))
    pairs = zip([*[1] * (rank - len(one)), *one], [*[1] * (rank - len(other)), *other], strict=True)
    return [second if first == 1 else first for first, second in pairs]


def _convolve(x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], groups: int) -> Tensor:
    """A convolution of one item, or of a batch of them."""
    rank = w.dim() - 2
    is_one = x.dim() == rank + 1
    batch = aten.unsqueeze.default(x, 0) if is_one else x
    args = (list(stride), list(padding), [1] * rank, False, [0] * rank, groups)
    acc: Tensor = out_dtype(aten.convolution.default, torch.int32, batch, w, None, *args)
    return aten.squeeze.dim(acc, 0) if is_one else acc


def _insert_zeros(x: Tensor, steps: Sequence[int]) -> Tensor:
    """`x` with zeros between its elements, which are then `steps` apart on its last axes."""
    for place, step in enumerate(steps):
        axis = x.dim() - len(steps) + place
        if step == 1:
            continue
        before, length, after = list(x.shape[:axis]), x.shape[axis], list(x.shape[axis + 1 :])
        apart = aten.reshape.default(x, [*before, length, 1, *after])
        padded = aten.constant_pad_nd.default(apart, [*[0, 0] * len(after), 0, step - 1])
        joined = aten.reshape.default(padded, [*before, length * step, *after])
        x = aten.slice.Tensor(joined, axis, 0, (length - 1) * step + 1)
    return x


def _flip_taps(w: Tensor, groups: int) -> Tensor:
    """The weight of a transposed convolution as that of the convolution it is: taps turned about, channels exchanged."""
    inputs, outputs, taps = w.shape[0] // groups, w.shape[1], list(w.shape[2:])
    exchanged = aten.transpose.int(aten.reshape.default(w, [groups, inputs, outputs, *taps]), 1, 2)
    whole = aten.reshape.default(exchanged, [groups * outputs, inputs, *taps])
    turned: Tensor = aten.flip.default(whole, list(range(2, w.dim())))
    return turned


def _finish(acc: Tensor, bias: Tensor | None, trailing: int, multiplier: Tensor | None, *out: Any) -> Tensor:
    """The accumulator with its bias; on the grid of the result if there is a multiplier.

    `trailing` axes come after that of the channels.
    """
    if bias is not None:
        shape = [-1, *[1] * trailing] if bias.dim() else []
        acc = aten.add.Tensor(acc, aten.reshape.default(bias, shape))
    return acc if multiplier is None else rescale(acc, multiplier, *out)
