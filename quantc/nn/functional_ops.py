"""Functions of quantized tensors that are computed on bytes, or in float between two roundings.

A byte has 256 values, so what a function of one number makes of each is computed once, by torch's own function, and looked
up from then on. What takes several numbers to one is computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantc.errors import DataError
from quantc.ir.dialect import RANGES
from quantc.ir.op_row import byte_grid
from quantc.nn.quantized_tensor import BYTES, QuantizedTensor, check_quantized, quantize_per_tensor
from quantc.targets.kernels.int8_pools import MaxPool
from quantc.targets.kernels.packing import BYTEWISE, as_quantized, hush
from quantc.targets.kernels.qnnpack_activations import ByteTranslation

Grid = tuple[float, int]
Function = Callable[..., Tensor]

FIXED: dict[str, tuple[float, int]] = {name: byte_grid(*ends) for name, ends in RANGES.items()}
"""The uint8 grids of functions with a fixed range. Others stay on the grid of their input."""


def fixed_grid(name: str, dtype: torch.dtype) -> Grid | None:
    """The grid of a function whose range is known."""
    if name not in FIXED:
        return None
    scale, zero_point = FIXED[name]
    return scale, zero_point + torch.iinfo(dtype).min


def pointwise(function: Function, x: Any, *settings: Any, grid: Grid | None = None) -> QuantizedTensor:
    """Apply a unary function, onto the given grid, its fixed one, or the input's."""
    name = function.__name__.strip("_").partition(".")[0]  # of an overload: the name of its op
    q = check_quantized(x, name)
    onto = grid or fixed_grid(name, q.dtype) or q.grid
    if q.dtype not in BYTES:
        return quantize_per_tensor(function(q.dequantize(), *settings), *onto, q.dtype)
    made: Tensor = _table(function, settings, q.grid, onto, q.dtype).forward(q.data_of)
    return QuantizedTensor(made, *onto)


@lru_cache(maxsize=1024)
def _table(
    function: Function, settings: tuple[Any, ...], grid: Grid, onto: Grid, dtype: torch.dtype
) -> ByteTranslation:
    limits = torch.iinfo(dtype)
    with torch.inference_mode(False), torch.no_grad():
        levels = QuantizedTensor(torch.arange(limits.min, limits.max + 1).to(dtype), *grid)
        return ByteTranslation(
            quantize_per_tensor(function(levels.dequantize(), *settings), *onto, dtype).data_of, dtype
        )


def clamp_levels(x: Any, low: float | None, high: float | None, what: str = "clamp") -> QuantizedTensor:
    """Numbers between two bounds: levels between the levels of those."""
    q = check_quantized(x, what)
    return q.like(q.data_of.clamp(*_levels(q, low, high)))


def clamp_levels_(x: Any, low: float | None, high: float | None, what: str = "clamp_") -> QuantizedTensor:
    """The same in place."""
    q = check_quantized(x, what)
    q.data_of.clamp_(*_levels(q, low, high))
    return q


def _levels(q: QuantizedTensor, low: float | None, high: float | None) -> tuple[int, int]:
    scale, zero_point = q.grid
    limits = torch.iinfo(q.dtype)

    def level(bound: float | None, other: int) -> int:
        return other if bound is None else min(max(round(bound / scale) + zero_point, limits.min), limits.max)

    return level(low, limits.min), level(high, limits.max)


def in_float(function: Function, *xs: Any, grid: Grid | None = None, what: str = "") -> QuantizedTensor:
    """Apply a float function to dequantized tensors, and round the result to the given grid, or that of the first operand."""
    tensors = [check_quantized(x, what or getattr(function, "__name__", "it")) for x in xs]
    first = tensors[0]
    return quantize_per_tensor(function(*(q.dequantize() for q in tensors)), *(grid or first.grid), first.dtype)


def requantize(x: QuantizedTensor, grid: Grid, dtype: torch.dtype | None = None) -> QuantizedTensor:
    """The same numbers on another grid."""
    kind = x.dtype if dtype is None else dtype
    return x if x.grid == grid and x.dtype is kind else quantize_per_tensor(x.dequantize(), *grid, kind)


# -- two tensors, and numbers ------------------------------------------------------------------------------------------


def bytewise(op: str, x: Any, y: Any, grid: Grid) -> QuantizedTensor:
    """`add`, `add relu`, `mul` or `mul relu` of two tensors: in one go, if they have one shape and are unsigned."""
    first, second = check_quantized(x, op), check_quantized(y, op)
    if first.shape == second.shape and first.dtype is second.dtype is torch.uint8 and first.numel():
        hush()
        made = torch.empty_like(first.data_of)
        read = (as_quantized(q.data_of, *q.grid) for q in (first, second))
        BYTEWISE[op](*read, as_quantized(made, *grid))
        return QuantizedTensor(made, *grid)
    name, _, after = op.partition(" ")
    function = torch.add if name == "add" else torch.mul
    made_of = in_float(function, first, second, grid=grid, what=op)
    return clamp_levels_(made_of, 0.0, None) if after else made_of


def cat_on_grid(xs: Sequence[Any], dim: int, grid: Grid) -> QuantizedTensor:
    """Tensors one after the other, on one grid."""
    parts = [requantize(check_quantized(x, "cat"), grid) for x in xs]
    return QuantizedTensor(torch.cat([part.data_of for part in parts], dim), *grid)


def times_scalar(x: Any, number: float) -> QuantizedTensor:
    """Numbers times another: the same levels with another scale, in the opposite order if that is below 0."""
    q = check_quantized(x, "mul_scalar")
    scale, zero_point = q.grid
    limits = torch.iinfo(q.dtype)
    if number == 0:
        return QuantizedTensor(torch.zeros_like(q.data_of), 1.0, 0)
    if number > 0:
        return QuantizedTensor(q.data_of.clone(), scale * number, zero_point)
    turned = (limits.max + limits.min - q.data_of.to(torch.int16)).to(q.dtype)
    return QuantizedTensor(turned, scale * -number, limits.max + limits.min - zero_point)


def plus_scalar(x: Any, number: float) -> QuantizedTensor:
    """Numbers plus another: the same levels with another zero point; a wider grid where that is out of range."""
    q = check_quantized(x, "add_scalar")
    scale, zero_point = q.grid
    limits = torch.iinfo(q.dtype)
    steps = round(number / scale)
    moved = zero_point - steps
    if limits.min <= moved <= limits.max:
        return QuantizedTensor(q.data_of.clone(), scale, moved)
    span = limits.max - limits.min
    if moved < limits.min:
        wide: Grid = ((limits.max - moved) / span * scale, limits.min)
    else:
        wide = ((moved - limits.min) / span * scale, limits.max)
    return quantize_per_tensor((q.data_of.float() - moved) * scale, *wide, q.dtype)


# -- windows -----------------------------------------------------------------------------------------------------------


def max_pool2d(
    x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> QuantizedTensor:
    """The largest of each window."""
    q = check_quantized(x, "max_pool2d")
    if q.dtype not in BYTES:
        raise DataError(f"max_pool2d takes int8 and uint8, not {q.dtype}")
    hush()
    sizes = [_pair(size) for size in (kernel_size, stride or kernel_size, padding, dilation)]
    return q.like(MaxPool(*sizes, ceil_mode).run((*sizes, ceil_mode), q.data_of))


def _pair(value: Any) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * 2 if len(values) == 1 else values
