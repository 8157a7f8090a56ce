"""Quantized ops as functions of integers and scales: what the integer form computes, without a program.

    out = quantized_linear(x_int8, x_scale, x_zero_point, weight_int8, weight_scale, weight_zero_point, bias_fp32,
                           output_scale, output_zero_point)

Tensors are int8, uint8 or int16. Scales are float32 values: a number that is none is rounded to the nearest. A weight has
one scale and zero point, or a tensor of them with one for each output channel. The result is of the type of `x`, and
within its range, unless `qmin`, `qmax` and `dtype` say otherwise. Sums are exact and each result is rounded once, half to
even; `multiplier="fixed"` has that done with a 32-bit mantissa and a shift, "shift" with a shift alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from quantc.errors import DataError, suggest
from quantc.integer.accumulators import AccumulatedWeight, accumulation
from quantc.integer.epilogue import reach
from quantc.integer.fixed_point import common_shift, mantissa_and_shift, shift_of, whole_shifts
from quantc.integer.grid import Grid
from quantc.integer.library import OPS
from quantc.integer.match_lowering import NotIntegerError
from quantc.integer.semantics import load
from quantc.spec.arithmetic import MultiplierForm
from quantc.spec.numerics import quantize_bias

Numbers = float | Tensor
Places = int | Tensor
STORED = (torch.int8, torch.uint8, torch.int16)


def quantized_linear(
    x_int8: Tensor,
    x_scale: Numbers,
    x_zero_point: Places,
    weight_int8: Tensor,
    weight_scale: Numbers,
    weight_zero_point: Places,
    bias_fp32: Tensor | None,
    output_scale: Numbers,
    output_zero_point: Places,
    *,
    qmin: int | None = None,
    qmax: int | None = None,
    dtype: torch.dtype | None = None,
    multiplier: MultiplierForm = "float64",
) -> Tensor:
    """A linear layer: `weight_int8` is `[output channels, input channels]`, as in `torch.nn.Linear`.

    `acc = Σ (xq − xz)(wq − wz) + round(b / (sx·sw))`, exactly, then `clamp(round(acc · (sx·sw / so)) + zo, qmin, qmax)`.
    """
    x, w = _grid("x", x_int8, x_scale, x_zero_point), _grid("weight", weight_int8, weight_scale, weight_zero_point)
    out = _output(x, output_scale, output_zero_point, qmin, qmax, dtype)
    return _product("linear", x_int8, x, weight_int8, w, bias_fp32, (), out, multiplier)


def quantized_conv2d(
    x_int8: Tensor,
    x_scale: Numbers,
    x_zero_point: Places,
    weight_int8: Tensor,
    weight_scale: Numbers,
    weight_zero_point: Places,
    bias_fp32: Tensor | None,
    output_scale: Numbers,
    output_zero_point: Places,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    *,
    qmin: int | None = None,
    qmax: int | None = None,
    dtype: torch.dtype | None = None,
    multiplier: MultiplierForm = "float64",
) -> Tensor:
    """A convolution over two axes, by the formula of `quantized_linear`. Padding is the real number 0."""
    x, w = _grid("x", x_int8, x_scale, x_zero_point), _grid("weight", weight_int8, weight_scale, weight_zero_point)
    out = _output(x, output_scale, output_zero_point, qmin, qmax, dtype)
    window = (*(_pair(value) for value in (stride, padding, dilation)), groups)
    return _product("conv", x_int8, x, weight_int8, w, bias_fp32, window, out, multiplier)


def quantized_add(
    x_int8: Tensor,
    x_scale: Numbers,
    x_zero_point: Places,
    y_int8: Tensor,
    y_scale: Numbers,
    y_zero_point: Places,
    output_scale: Numbers,
    output_zero_point: Places,
    *,
    qmin: int | None = None,
    qmax: int | None = None,
    dtype: torch.dtype | None = None,
    multiplier: MultiplierForm = "float64",
) -> Tensor:
    """A sum: `clamp(round((xq − xz) · (sx / so) + (yq − yz) · (sy / so)) + zo, qmin, qmax)`, rounded once."""
    load()
    _check_form(multiplier)
    x, y = _grid("x", x_int8, x_scale, x_zero_point), _grid("y", y_int8, y_scale, y_zero_point)
    out = _output(x, output_scale, output_zero_point, qmin, qmax, dtype)
    factors, shift = [grid.scale / out.scale for grid in (x, y)], None
    if multiplier != "float64":
        _check_shifts(multiplier, *factors)
        found = common_shift(factors, [reach(x), reach(y)], least=multiplier == "shift")
        if found is None:
            raise DataError("the multipliers are too large for sums of 64 bits", advice='use multiplier="float64"')
        factors, _, shift = found
    zeros, ends = [x.one_zero_point, y.one_zero_point], (out.one_zero_point, out.qmin, out.qmax, out.dtype)
    result: Tensor = OPS["sum"].target([x_int8, y_int8], zeros, factors, None, shift, *ends)
    return result


def _product(
    op: str,
    x_levels: Tensor,
    x: Grid,
    w_levels: Tensor,
    w: Grid,
    bias: Tensor | None,
    window: tuple[Any, ...],
    out: Grid,
    form: MultiplierForm,
) -> Tensor:
    load()
    _check_form(form)
    if bias is not None and bias.shape != w_levels.shape[:1]:
        raise DataError(
            f"the bias has the shape {list(bias.shape)}",
            advice=f"give one number for each of {w_levels.shape[0]} outputs",
        )
    levels = None if bias is None else quantize_bias(bias.detach(), x.scale, w.scale, where="bias_fp32")
    try:
        sums = accumulation(x, AccumulatedWeight(w, w_levels), levels, None)
    except NotIntegerError as refusal:
        raise DataError(str(refusal), where=op, advice="use fewer input channels or narrower integers") from refusal
    trailing = [1] * (w_levels.dim() - 2)
    scale = x.scale * w.scale / out.scale
    scale = scale if w.is_whole else scale.reshape(-1, *trailing)
    _check_shifts(form, scale)
    factor, shift = (scale, None) if form == "float64" else _FORMS[form](scale)
    zeros = w.zero_point if bool(w.zero_point.any()) else None
    head = (x_levels, x.one_zero_point, w_levels, zeros, levels, *window, sums.parts)
    ends = (out.one_zero_point, out.qmin, out.qmax, out.dtype)
    result: Tensor = OPS[op].target(*head, factor, shift, *ends)
    return result


_FORMS = {"fixed": mantissa_and_shift, "shift": whole_shifts}


def _check_shifts(form: MultiplierForm, *factors: Tensor) -> None:
    if form == "shift" and any(shift_of(item) is None for item in factors):
        raise DataError("the ratio of the scales is no power of two", advice='use multiplier="fixed"')


def _check_form(multiplier: str) -> None:
    if multiplier not in get_args(MultiplierForm):
        advice = suggest(str(multiplier), get_args(MultiplierForm), noun="forms")
        raise DataError(f"unknown multiplier of the form {multiplier!r}", advice=advice)


def _grid(name: str, levels: Tensor, scale: Numbers, zero_point: Places) -> Grid:
    """The grid of a tensor's integers; several scales belong to its first axis."""
    if levels.dtype not in STORED:
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED)
        raise DataError(f"{name} is {levels.dtype}, not {kinds}", advice="quantize it first")
    scales = torch.as_tensor(scale, dtype=torch.float32).detach().double()
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise DataError(f"the scale of {name} is not a positive number", advice="give scales above 0")
    zeros = torch.as_tensor(zero_point).to(torch.int64)
    limits = torch.iinfo(levels.dtype)
    if not bool(((zeros >= limits.min) & (zeros <= limits.max)).all()):
        raise DataError(
            f"a zero point of {name} is outside {limits.min}..{limits.max}",
            advice=f"give zero points that are values of {levels.dtype}",
        )
    if scales.numel() == zeros.numel() == 1:
        return Grid(scales.reshape(()), zeros.reshape(()), limits.min, limits.max, levels.dtype)
    channels = levels.shape[:1]
    if name != "weight" or not all(item.numel() == 1 or item.shape == channels for item in (scales, zeros)):
        raise DataError(
            f"{name} of shape {list(levels.shape)} has scales {list(scales.shape)} and zero points {list(zeros.shape)}",
            advice="give one for each output channel of the weight, and one number for anything else",
        )
    return Grid(scales.expand(channels), zeros.expand(channels), limits.min, limits.max, levels.dtype, axis=0)


def _output(
    x: Grid, scale: Numbers, zero_point: Places, qmin: int | None, qmax: int | None, dtype: torch.dtype | None
) -> Grid:
    kind = x.dtype if dtype is None else dtype
    made = _grid("the output", torch.empty(0, dtype=kind), scale, zero_point)
    low, high = made.qmin if qmin is None else qmin, made.qmax if qmax is None else qmax
    if not made.qmin <= low <= high <= made.qmax:
        raise DataError(f"{low}..{high} is not a range of {kind}", advice=f"stay in {made.qmin}..{made.qmax}")
    return Grid(made.scale, made.zero_point, low, high, kind)


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


__all__ = ["quantized_add", "quantized_conv2d", "quantized_linear"]
