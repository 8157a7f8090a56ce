"""Kernels of `dynamic`, through the kernels for static qparams: the same sums, with the run-time qparams put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quantc.integer.ops import product_kernels
from quantc.integer.ops.product_kernels import BLOCK
from quantc.qdq.choose_qparams import extremes, qparams_between

SUMS = (None, None, 0, 0, 0, torch.float64)
"""The last arguments of a product that yields its exact sums."""
Sum = Callable[..., Tensor]
"""A product that lacks its bias and what comes after it, and is given them."""


def linear(
    x: Tensor,
    w: Tensor,
    w_zero_point: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    per_token: bool,
    *grid: Any,
) -> Tensor:
    """`dynamic.linear_dynamic`."""
    *of_x, parts = _all_arguments(grid, 5, 0)
    levels, scale = _levels(x, per_token, *of_x)

    def product(bias: Tensor | None, *out: Any) -> Tensor:
        return product_kernels.linear(levels, 0, w, w_zero_point, bias, parts, *out)

    return _real(product, scale, w_scale, bias)


def matmul(
    x: Tensor,
    y: Tensor,
    y_zero_point: Tensor | None,
    y_scale: Tensor,
    bias: Tensor | None,
    per_token: bool,
    *grid: Any,
) -> Tensor:
    """`dynamic.matmul_dynamic`."""
    *of_x, alpha, parts = _all_arguments(grid, 5, 1.0, 0)
    levels, scale = _levels(x, per_token, *of_x)

    def product(bias: Tensor | None, *out: Any) -> Tensor:
        return product_kernels.matmul(levels, 0, y, y_zero_point, bias, parts, *out)

    return _real(product, scale, y_scale, bias, alpha=alpha)


def conv(
    x: Tensor,
    w: Tensor,
    w_zero_point: Tensor | None,
    w_scale: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *grid: Any,
) -> Tensor:
    """`dynamic.conv_dynamic`."""
    *of_x, parts = _all_arguments(grid, 5, 0)
    levels, scale = _levels(x, False, *of_x)
    window = (stride, padding, dilation, groups, parts)

    def product(bias: Tensor | None, *out: Any) -> Tensor:
        return product_kernels.conv(levels, 0, w, w_zero_point, bias, *window, *out)

    return _real(product, scale, w_scale, bias, len(stride))


def conv_transpose(
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
    *grid: Any,
) -> Tensor:
    """`dynamic.conv_transpose_dynamic`."""
    *of_x, parts = _all_arguments(grid, 5, 0)
    levels, scale = _levels(x, False, *of_x)
    window = (stride, padding, output_padding, groups, dilation, parts)

    def product(bias: Tensor | None, *out: Any) -> Tensor:
        return product_kernels.conv_transpose(levels, 0, w, w_zero_point, bias, *window, *out)

    return _real(product, scale, w_scale, bias, len(stride))


def linear_both(x: Tensor, w: Tensor, bias: Tensor | None, *grids: Any) -> Tensor:
    """`dynamic.linear_both_dynamic`."""
    (parts,) = _all_arguments(grids, 12, 0)[12:]
    (left, scale), (right, w_scale) = _levels(x, *grids[:6]), _levels(w, *grids[6:12])

    def product(bias: Tensor | None, *out: Any) -> Tensor:
        return product_kernels.linear(left, 0, right, None, bias, parts, *out)

    return _real(product, scale, w_scale.reshape(-1) if w_scale.dim() else w_scale, bias)


def matmul_both(x: Tensor, y: Tensor, bias: Tensor | None, *grids: Any) -> Tensor:
    """`dynamic.matmul_both_dynamic`."""
    alpha, parts = _all_arguments(grids, 12, 1.0, 0)[12:]
    (left, scale), (right, y_scale) = _levels(x, *grids[:6]), _levels(y, *grids[6:12])
    columns = right.unsqueeze(-1) if y.dim() == 1 else right

    def product(bias: Tensor | None, *out: Any) -> Tensor:
        return product_kernels.matmul(left, 0, columns, None, bias, parts, *out)

    result = _real(product, scale, y_scale, bias, alpha=alpha)
    return result.squeeze(-1) if y.dim() == 1 else result


# -- what they are made of -----------------------------------------------------------------------------------------


def _all_arguments(arguments: Sequence[Any], count: int, *defaults: Any) -> tuple[Any, ...]:
    """`count` arguments and the optional ones; torch omits arguments that have their default."""
    return (*arguments, *defaults[len(arguments) - count :])


def _levels(
    x: Tensor, per_token: bool, zero_point: int | None, qmin: int, qmax: int, dtype: torch.dtype, eps: float
) -> tuple[Tensor, Tensor]:
    """The integers of a float tensor less their zero point, as float32, and their scale. Its dtype has room for them."""
    low, high = _extremes(x, per_token)
    scale, offset = qparams_between(low, high, zero_point, qmin, qmax, eps)
    levels = x.to(torch.float32) * scale.reciprocal()
    if per_token:
        return levels.add_(offset).round_().clamp_(qmin, qmax).sub_(offset), scale
    middle = int(offset)
    return levels.round_().clamp_(qmin - middle, qmax - middle), scale


def _extremes(x: Tensor, per_token: bool) -> tuple[Tensor, Tensor]:
    """`run_time.extremes`, in one pass where that is faster."""
    if per_token or not x.numel() or x.dtype is not torch.float32:
        return extremes(x, per_token)
    low, high = torch.aminmax(x)
    return low.clamp_(max=0), high.clamp_(min=0)


def _real(
    product: Sum,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None,
    trailing: int = 0,
    alpha: float = 1.0,
) -> Tensor:
    """The sums of a product with their bias, as real numbers: see `dynamic._real`."""
    of_x = x_scale.double() * alpha
    if x_scale.dim():
        return _by_row(product(None, *SUMS), of_x, w_scale.double(), bias)
    step = of_x * w_scale.double()
    steps = None if bias is None else _steps(bias, step)
    if step.dim():
        step = step.reshape(-1, *[1] * trailing)
    return product(steps, step, None, 0, 0, 0, torch.float32)


def _steps(bias: Tensor, step: Tensor) -> Tensor:
    """A bias as a whole number of steps, of which none has the sign of -0.0: integers have one zero."""
    return torch.round(bias.double() / step).add_(0.0)


def _by_row(sums: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Sums, which are used up, as real numbers; their scales go with the rows, and with the columns if `w` has several.

    Done a few rows at a time, so as to stay in the cache.
    """
    rows = x_scale.expand([*sums.shape[:-1], 1]).reshape(-1, 1)
    totals = sums.reshape(rows.shape[0], sums.shape[-1])
    result = torch.empty_like(totals, dtype=torch.float32)
    height = max(1, BLOCK // max(sums.shape[-1], 1))
    for start in range(0, totals.shape[0], height):
        block = slice(start, start + height)
        step = rows[block] * w_scale
        total = totals[block]
        if bias is not None:
            total = total.add_(_steps(bias, step))
        result[block] = total.mul_(step)
    return result.reshape(sums.shape)
