"""Linear layers that find the scale of their input each time they run."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._higher_order_ops.out_dtype import out_dtype

from quantc.integer.arithmetic import aten, centered
from quantc.integer.library import integer_op
from quantc.run_time import choose_qparams, quantized

DYNAMIC = (
    "sx, xz from the smallest and the largest x: of all, or of each row (per token); xq = clamp(round(x / sx) + xz); "
    "acc = Σ (xq − xz)(wq − wz) in int32; bias_q = round(b / (sx·sw)); out = f32((acc + bias_q) · (sx·sw))"
)


def _linear_dynamic_fast(
    x: Tensor,
    w: Tensor,
    w_zero_point: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    per_token: bool,
    zero_point: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    """`linear_dynamic` with its sums of integers in float64, where they are exact."""
    scale, offset = choose_qparams(x, per_token, zero_point, qmin, qmax, eps)
    levels = quantized(x, scale, offset, per_token, qmin, qmax, dtype).double() - offset
    rows = w.double() if w_zero_point is None else w - _for_rows(w_zero_point).double()
    # adding zero makes -0.0, which integers do not have, 0.0
    return _real((levels @ rows.t()).add_(0.0), scale, w_scale, bias)


@integer_op(
    "linear_dynamic(Tensor x, Tensor w, Tensor? w_zero_point, Tensor w_scale, Tensor? bias, bool per_token, "
    "int? x_zero_point, int qmin, int qmax, ScalarType dtype, float eps) -> Tensor",
    formula=DYNAMIC,
    kernel=_linear_dynamic_fast,
)
def linear_dynamic(
    x: Tensor,
    w: Tensor,
    w_zero_point: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    per_token: bool,
    zero_point: int | None,
    qmin: int,
    qmax: int,
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    """A matrix product of a float tensor with the weight's rows, on the last axis: quantized as it comes, and float again.

    Without `x_zero_point` the input's grid is affine, with one it is symmetric about it. The weight has one scale, or
    one for each row. A range that is not finite makes results that are not.
    """
    scale, offset = choose_qparams(x, per_token, zero_point, qmin, qmax, eps)
    levels = centered(quantized(x, scale, offset, per_token, qmin, qmax, dtype), offset)
    rows = centered(w, 0 if w_zero_point is None else _for_rows(w_zero_point))
    flat = aten.reshape.default(levels, [-1, x.shape[-1]])
    acc = out_dtype(aten.mm.default, torch.int32, flat, aten.transpose.int(rows, 0, 1))
    return _real(aten.reshape.default(acc, [*x.shape[:-1], w.shape[0]]), scale, w_scale, bias)


def _for_rows(values: Tensor) -> Tensor:
    """Numbers that go with the rows of a matrix, or one for all."""
    shaped: Tensor = aten.reshape.default(values, [-1, 1] if values.dim() else [])
    return shaped


def _real(acc: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """The accumulator with its bias, as real numbers.

    Both are integers, but they are added in float64: how many steps the bias is depends on the input at hand, and no
    scale can be raised any more so that it fits an int32. Up to 2^53 the sum is exact.
    """
    step = aten.mul.Tensor(aten.to.dtype(x_scale, torch.float64), aten.to.dtype(w_scale, torch.float64))
    total = aten.to.dtype(acc, torch.float64)
    if bias is not None:
        total = aten.add.Tensor(total, aten.round.default(aten.div.Tensor(aten.to.dtype(bias, torch.float64), step)))
    real: Tensor = aten.to.dtype(aten.mul.Tensor(total, step), torch.float32)
    return real
