"""Linear layers and convolutions of quantized tensors: the op of the integer form, on the kernels of a target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantc.errors import DataError
from quantc.nn.functional_ops import Grid
from quantc.nn.kernel_ops import Run, on_kernel
from quantc.nn.quantized_tensor import QuantizedTensor
from quantc.spec.instruction_sets import SIGN_SHIFT
from quantc.spec.numerics import fit_weight_scale, multiplier, quantize_bias


@dataclass(frozen=True, eq=False)
class Product:
    """A product with a weight, and where its result goes."""

    op: str
    """`linear`, `conv` or `conv_transpose`."""
    weight: QuantizedTensor
    bias: Tensor | None
    grid: Grid
    """Of the result."""
    dtype: torch.dtype = torch.uint8
    relu: bool = False
    window: tuple[tuple[str, Any], ...] = ()
    """Arguments of the integer op after the bias, by name and in order."""

    @property
    def groups(self) -> int:
        return int(dict(self.window).get("groups", 1))

    @property
    def axes(self) -> int:
        """Number of spatial axes."""
        return self.weight.dim() - 2

    def by_output(self, values: Tensor) -> Tensor:
        """Numbers of the weight, one for each output; groups of a transposed convolution have theirs in common."""
        many = self.op == "conv_transpose" and values.numel() > 1
        return values.repeat(self.groups) if many else values


def product_kernel(target: str, product: Product, x: QuantizedTensor) -> Run:
    """A function of levels like those of `x`, on its grid, that gives the levels of the result.

    Kernels of x86 multiply unsigned bytes. Signed ones are shifted, which changes no number.
    """
    shift_in = SIGN_SHIFT if target == "x86" and x.dtype is torch.int8 else 0
    shift_out = SIGN_SHIFT if target == "x86" and product.dtype is torch.int8 else 0
    read = x.data_of.view(torch.uint8) if shift_in else x.data_of
    scale, zero_point = x.grid
    dtype = torch.uint8 if shift_out else product.dtype
    run = on_kernel(target, product.op, [read], _arguments(product, scale, zero_point + shift_in, shift_out, dtype))
    if not shift_in and not shift_out:
        return run
    return _with_shifts(run, shift_in, shift_out)


def _with_shifts(run: Run, shift_in: int, shift_out: int) -> Run:
    def shifted(data: Tensor) -> Tensor:
        read = data.view(torch.uint8).bitwise_xor(shift_in) if shift_in else data
        made: Tensor = run(read)
        return made.bitwise_xor(shift_out).view(torch.int8) if shift_out else made

    return shifted


def _arguments(product: Product, x_scale: float, x_zero: int, shift: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the integer op after its input."""
    weight, bias = product.weight, product.bias
    w_scale = torch.as_tensor(weight.scale_of, dtype=torch.float64)
    levels = weight.data_of
    zeros = torch.as_tensor(weight.zero_point_of)
    steps = torch.tensor(x_scale, dtype=torch.float64)
    whole = product.by_output(w_scale)
    bias_levels = None
    if bias is not None:
        bias = bias.detach().float()
        fitting = fit_weight_scale(bias, steps, whole.float()).double()
        if bool((fitting > whole * (1 + 1e-6)).any()):
            levels, w_scale, zeros = _coarser(product, fitting)
            whole = w_scale
        bias_levels = quantize_bias(bias, steps, whole)
    out_scale, out_zero = product.grid
    limits = torch.iinfo(dtype)
    out_zero += shift
    low = max(limits.min, out_zero) if product.relu else limits.min
    factor = multiplier(steps, whole, torch.tensor(out_scale, dtype=torch.float64))
    return {
        "x_zero_point": x_zero,
        "w": levels,
        "w_zero_point": zeros.to(torch.int32) if bool((zeros != 0).any()) else None,
        "bias": bias_levels,
        **dict(product.window),
        "parts": 0,
        "multiplier": factor.reshape([-1] + [1] * product.axes) if factor.dim() else factor,
        "shift": None,
        "out_zero_point": out_zero,
        "qmin": low,
        "qmax": limits.max,
        "dtype": dtype,
    }


def _coarser(product: Product, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight on larger scales, one for each output, so that its bias fits the accumulator: the channel of a weight
    that is all zeros has the smallest scale there is."""
    if product.op == "conv_transpose" and product.groups > 1:
        raise DataError(
            "a bias is more than 2^30 steps of the accumulator, in a transposed convolution with groups",
            advice="give it a weight observer with a larger eps",
        )
    weight, axis = product.weight, 1 if product.op == "conv_transpose" else 0
    shape = [1] * weight.dim()
    shape[axis] = -1
    real = weight.dequantize().double()
    limits = torch.iinfo(weight.dtype)
    wide = scale.expand(weight.shape[axis]).contiguous()
    levels = torch.round(real / wide.reshape(shape)).clamp(limits.min, limits.max).to(weight.dtype)
    return levels, wide, torch.zeros(len(wide), dtype=torch.int64)
