"""Dynamically quantized matmul and conv: quantize input, integer accumulate, dequantize.

Without a zero point a grid is affine; with one it is symmetric about it. A non-finite range has no scale, and yields
NaN. `parts` is as in `products`, and never changes the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.integer.library import integer_op
from quantc.integer.ops import dynamic_kernels, products
from quantc.qdq.choose_qparams import choose_qparams, quantize_tensor
from quantc.spec.aten_arithmetic import aten

FOUND = "sx, xz from the smallest and the largest x"
ROUNDED = "xq = clamp(round(x / sx) + xz)"
SUMMED = "acc = Σ (xq − xz)(wq − wz) in int32; bias_q = round(b / (sx·sw)); out = f32((acc + bias_q) · (sx·sw))"
OF_TWO = SUMMED.replace("wq − wz", "yq − yz").replace("sx·sw", "α·sx·sy")
ROWS = f"{FOUND}: of all, or of each row (per token); {ROUNDED}"
WHOLE = f"{FOUND}; {ROUNDED}; {SUMMED}"
DYNAMIC = f"{ROWS}; {SUMMED}"
MATMUL = f"{ROWS}; {OF_TWO}"
BOTH = f"{ROWS}; w likewise; {SUMMED}"
MATMUL_BOTH = f"{ROWS}; y likewise, of all; {OF_TWO}"

GRID = "int? x_zero_point, int qmin, int qmax, ScalarType dtype, float eps"
"""Quantization of the input: the last arguments of every op here, before `parts`."""
ACCUMULATOR = (None, None, 0, 0, 0, torch.int32)
"""The last arguments of a product that yields its accumulator."""


def of_two(second: str) -> str:
    """Schema text of the quantization arguments of both factors."""
    names = ("per_token", "zero_point", "qmin", "qmax", "dtype", "eps")
    types = ("bool", "int?", "int", "int", "ScalarType", "float")
    return ", ".join(f"{kind} {side}_{name}" for side in ("x", second) for kind, name in zip(types, names, strict=True))


@integer_op(
    f"linear_dynamic(Tensor x, Tensor w, Tensor? w_zero_point, Tensor w_scale, Tensor? bias, bool per_token, {GRID}, "
    "int parts=0) -> Tensor",
    formula=DYNAMIC,
    kernel=dynamic_kernels.linear,
)
def linear_dynamic(
    x: Tensor,
    w: Tensor,
    w_zero_point: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    per_token: bool,
    x_zero_point: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    eps: float,
    parts: int = 0,
) -> Tensor:
    """Linear layer on a float tensor, quantized at run time.

    The weight has one scale, or one per row.
    """
    levels, scale, offset = _as_it_comes(x, per_token, x_zero_point, qmin, qmax, dtype, eps)
    acc = products.linear(levels, offset, w, w_zero_point, None, parts, *ACCUMULATOR)
    return _real(acc, scale, w_scale, bias)


@integer_op(
    f"matmul_dynamic(Tensor x, Tensor y, Tensor? y_zero_point, Tensor y_scale, Tensor? bias, bool per_token, {GRID}, "
    "float alpha=1.0, int parts=0) -> Tensor",
    formula=MATMUL,
    kernel=dynamic_kernels.matmul,
)
def matmul_dynamic(
    x: Tensor,
    y: Tensor,
    y_zero_point: Tensor | None,
    y_scale: Tensor,
    bias: Tensor | None,
    per_token: bool,
    x_zero_point: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    eps: float,
    alpha: float = 1.0,
    parts: int = 0,
) -> Tensor:
    """Matmul of a float tensor, quantized at run time, by an integer matrix with one scale, or one per column."""
    levels, scale, offset = _as_it_comes(x, per_token, x_zero_point, qmin, qmax, dtype, eps)
    acc = products.matmul(levels, offset, y, y_zero_point, None, parts, *ACCUMULATOR)
    return _real(acc, scale, y_scale, bias, alpha=alpha)


@integer_op(
    "conv_dynamic(Tensor x, Tensor w, Tensor? w_zero_point, Tensor w_scale, Tensor? bias, int[] stride, int[] padding, "
    f"int[] dilation, int groups, {GRID}, int parts=0) -> Tensor",
    formula=WHOLE,
    kernel=dynamic_kernels.conv,
)
def conv_dynamic(
    x: Tensor,
    w: Tensor,
    w_zero_point: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    x_zero_point: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    eps: float,
    parts: int = 0,
) -> Tensor:
    """Convolution of a float tensor, quantized at run time, over one, two or three axes.

    The weight has one scale, or one per output channel. Padding is 0, which is in every range.
    """
    levels, scale, offset = _as_it_comes(x, False, x_zero_point, qmin, qmax, dtype, eps)
    window = (stride, padding, dilation, groups, parts)
    acc = products.conv(levels, offset, w, w_zero_point, None, *window, *ACCUMULATOR)
    return _real(acc, scale, w_scale, bias, len(stride))


@integer_op(
    "conv_transpose_dynamic(Tensor x, Tensor w, Tensor? w_zero_point, Tensor w_scale, Tensor? bias, int[] stride, "
    f"int[] padding, int[] output_padding, int groups, int[] dilation, {GRID}, int parts=0) -> Tensor",
    formula=f"{WHOLE}; x with zeros between its elements, w turned about and its channels exchanged",
    kernel=dynamic_kernels.conv_transpose,
)
def conv_transpose_dynamic(
    x: Tensor,
    w: Tensor,
    w_zero_point: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    x_zero_point: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    eps: float,
    parts: int = 0,
) -> Tensor:
    """Transposed convolution of a float tensor, quantized at run time, over one, two or three axes.

    The weight has one scale, or one per output channel.
    """
    levels, scale, offset = _as_it_comes(x, False, x_zero_point, qmin, qmax, dtype, eps)
    window = (stride, padding, output_padding, groups, dilation, parts)
    acc = products.conv_transpose(levels, offset, w, w_zero_point, None, *window, *ACCUMULATOR)
    return _real(acc, scale, w_scale, bias, len(stride))


@integer_op(
    f"linear_both_dynamic(Tensor x, Tensor w, Tensor? bias, {of_two('w')}, int parts=0) -> Tensor",
    formula=BOTH,
    kernel=dynamic_kernels.linear_both,
)
def linear_both_dynamic(x: Tensor, w: Tensor, bias: Tensor | None, *grids: Any) -> Tensor:
    """Linear of two float tensors, on the last axis of both, each quantized at run time."""
    (left, scale, offset), (right, w_scale, w_offset) = _as_it_comes(x, *grids[:6]), _as_it_comes(w, *grids[6:12])
    rows = aten.reshape.default(w_offset, [-1] if w_offset.dim() else [])
    acc = products.linear(left, offset, right, rows, None, 0, *ACCUMULATOR)
    return _real(acc, scale, aten.reshape.default(w_scale, [-1] if w_scale.dim() else []), bias)


@integer_op(
    f"matmul_both_dynamic(Tensor x, Tensor y, Tensor? bias, {of_two('y')}, float alpha=1.0, int parts=0) -> Tensor",
    formula=MATMUL_BOTH,
    kernel=dynamic_kernels.matmul_both,
)
def matmul_both_dynamic(x: Tensor, y: Tensor, bias: Tensor | None, *grids: Any) -> Tensor:
    """(Batched) matmul of two float tensors, each quantized at run time; the second per tensor."""
    (left, scale, offset), (right, y_scale, y_offset) = _as_it_comes(x, *grids[:6]), _as_it_comes(y, *grids[6:12])
    acc = products.matmul(left, offset, right, y_offset, None, 0, *ACCUMULATOR)
    if y.dim() == 1 and scale.dim():
        scale = aten.squeeze.dim(scale, -1)
    return _real(acc, scale, y_scale, bias, alpha=grids[12] if len(grids) > 12 else 1.0)


# -- what they are made of -----------------------------------------------------------------------------------------


def _as_it_comes(
    x: Tensor, per_token: bool, zero_point: int | None, qmin: int, qmax: int, dtype: torch.dtype, eps: float
) -> tuple[Tensor, Tensor, Any]:
    """A float tensor as integers, with the scale and the zero point of its own range."""
    scale, offset = choose_qparams(x, per_token, zero_point, qmin, qmax, eps)
    return quantize_tensor(x, scale, offset, per_token, qmin, qmax, dtype), scale, offset


def _real(
    acc: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, trailing: int = 0, alpha: float = 1.0
) -> Tensor:
    """The accumulator with its bias, as real numbers. `trailing` axes come after that of the output channels.

    Both are integers, but they are added in float64: how many steps the bias is depends on the input at hand, and no
    scale can be raised any more so that it fits an int32. Up to 2^53 the sum is exact.
    """
    of_x = aten.to.dtype(x_scale, torch.float64)
    if alpha != 1.0:
        of_x = aten.mul.Tensor(of_x, alpha)
    step = aten.mul.Tensor(of_x, _by_channel(w_scale, trailing))
    total = aten.to.dtype(acc, torch.float64)
    if bias is not None:
        total = aten.add.Tensor(total, aten.round.default(aten.div.Tensor(_by_channel(bias, trailing), step)))
    real: Tensor = aten.to.dtype(aten.mul.Tensor(total, step), torch.float32)
    return real


def _by_channel(values: Tensor, trailing: int) -> Tensor:
    """Numbers of the output channels in float64, or one for all, shaped to go with a result."""
    wide: Tensor = aten.to.dtype(values, torch.float64)
    return aten.reshape.default(wide, [-1, *[1] * trailing]) if trailing and values.dim() else wide
