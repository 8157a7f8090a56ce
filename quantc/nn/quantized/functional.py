"""Functions of quantized tensors, by torch's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as floats

from quantc.errors import DataError
from quantc.nn import functional_ops
from quantc.nn.kernel_ops import target
from quantc.nn.products import Product, product_kernel
from quantc.nn.quantized_tensor import QuantizedTensor, check_quantized
from quantc.spec.torch_dtypes import PLAIN

Sizes = int | Sequence[int]


# -- products ----------------------------------------------------------------------------------------------------------


def linear(
    input: Tensor,  # noqa: A002 - torch's name, here and below
    weight: Tensor,
    bias: Tensor | None = None,
    scale: float | None = None,
    zero_point: int | None = None,
) -> QuantizedTensor:
    """Linear layer; on the grid of its input unless one is given."""
    x, w = check_quantized(input, "linear"), check_quantized(weight, "linear")
    own_scale, own_zero = x.grid
    grid = own_scale if scale is None else float(scale), own_zero if zero_point is None else int(zero_point)
    return _product(Product("linear", w, bias, grid), x)


def conv1d(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> QuantizedTensor:  # noqa: A002
    """A convolution over one axis; see `convolution` for its other arguments."""
    return convolution(1, input, weight, bias, *args, **kwargs)


def conv2d(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> QuantizedTensor:  # noqa: A002
    """A convolution over two axes; see `convolution` for its other arguments."""
    return convolution(2, input, weight, bias, *args, **kwargs)


def conv3d(input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> QuantizedTensor:  # noqa: A002
    """A convolution over three axes; see `convolution` for its other arguments."""
    return convolution(3, input, weight, bias, *args, **kwargs)


def convolution(
    axes: int,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    scale: float = 1.0,
    zero_point: int = 0,
    dtype: torch.dtype = torch.quint8,
) -> QuantizedTensor:
    """A convolution whose weight is packed for this one call: modules keep theirs."""
    name = f"conv{axes}d"
    x, w = check_quantized(input, name), check_quantized(weight, name)
    around = _sizes(padding, axes)
    if padding_mode != "zeros" and any(around):
        pairs = [size for each in reversed(around) for size in (each, each)]
        x = x.like(floats.pad(x.data_of.float(), pairs, mode=padding_mode).to(x.dtype))
        around = [0] * axes
    window = (("stride", _sizes(stride, axes)), ("padding", around), ("dilation", _sizes(dilation, axes)))
    grid = float(scale), int(zero_point)
    kind = PLAIN.get(dtype, dtype)
    return _product(Product("conv", w, bias, grid, kind, window=(*window, ("groups", groups))), x)


def _product(product: Product, x: QuantizedTensor) -> QuantizedTensor:
    return QuantizedTensor(product_kernel(target(), product, x)(x.data_of), *product.grid)


def _sizes(value: Sizes, axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values


# -- activations -------------------------------------------------------------------------------------------------------


def relu(input: Tensor, inplace: bool = False) -> QuantizedTensor:  # noqa: A002
    return (functional_ops.clamp_levels_ if inplace else functional_ops.clamp_levels)(input, 0.0, None, "relu")


def relu6(input: Tensor, inplace: bool = False) -> QuantizedTensor:  # noqa: A002
    return (functional_ops.clamp_levels_ if inplace else functional_ops.clamp_levels)(input, 0.0, 6.0, "relu6")


def hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> QuantizedTensor:  # noqa: A002
    return (functional_ops.clamp_levels_ if inplace else functional_ops.clamp_levels)(
        input, min_val, max_val, "hardtanh"
    )


def clamp(input: Tensor, min_: float, max_: float) -> QuantizedTensor:  # noqa: A002
    return functional_ops.clamp_levels(input, min_, max_)


def leaky_relu(
    input: Tensor,  # noqa: A002
    negative_slope: float = 0.01,
    inplace: bool = False,
    scale: float | None = None,
    zero_point: int | None = None,
) -> QuantizedTensor:
    """On the grid of its input unless one is given."""
    grid = None if scale is None or zero_point is None else (float(scale), int(zero_point))
    return functional_ops.pointwise(floats.leaky_relu, input, negative_slope, grid=grid)


def hardswish(input: Tensor, scale: float, zero_point: int) -> QuantizedTensor:  # noqa: A002
    return functional_ops.pointwise(floats.hardswish, input, grid=(float(scale), int(zero_point)))


def elu(input: Tensor, scale: float, zero_point: int, alpha: float = 1.0) -> QuantizedTensor:  # noqa: A002
    return functional_ops.pointwise(floats.elu, input, alpha, grid=(float(scale), int(zero_point)))


def celu(input: Tensor, scale: float, zero_point: int, alpha: float = 1.0) -> QuantizedTensor:  # noqa: A002
    return functional_ops.pointwise(floats.celu, input, alpha, grid=(float(scale), int(zero_point)))


def hardsigmoid(input: Tensor, inplace: bool = False) -> QuantizedTensor:  # noqa: A002
    return functional_ops.pointwise(floats.hardsigmoid, input)


def threshold(input: Tensor, threshold: float, value: float) -> QuantizedTensor:  # noqa: A002
    return functional_ops.pointwise(floats.threshold, input, threshold, value)


# -- windows -----------------------------------------------------------------------------------------------------------


def max_pool2d(
    input: Tensor,  # noqa: A002
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> QuantizedTensor:
    _refuse_indices(return_indices)
    return functional_ops.max_pool2d(input, kernel_size, stride, padding, dilation, ceil_mode)


def max_pool1d(
    input: Tensor,  # noqa: A002
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> QuantizedTensor:
    """A pool over images that are one row high."""
    _refuse_indices(return_indices)
    x = check_quantized(input, "max_pool1d")
    sizes = [_sizes(size, 1)[0] for size in (kernel_size, stride or kernel_size, padding, dilation)]
    rows = ((1, sizes[0]), (1, sizes[1]), (0, sizes[2]), (1, sizes[3]))
    made = functional_ops.max_pool2d(x.like(x.data_of.unsqueeze(-2)), *rows, ceil_mode)
    return x.like(made.data_of.squeeze(-2))


def _refuse_indices(return_indices: bool) -> None:
    if return_indices:
        raise DataError(
            "pools of quantized tensors do not say where the largest are",
            where="return_indices=True",
            advice="leave it out, or pool the numbers: x.dequantize()",
        )


def avg_pool2d(input: Tensor, *args: Any, **kwargs: Any) -> QuantizedTensor:  # noqa: A002
    """Averages of windows; arguments as of torch's function, here and below."""
    return functional_ops.in_float(lambda x: floats.avg_pool2d(x, *args, **kwargs), input, what="avg_pool2d")


def avg_pool3d(input: Tensor, *args: Any, **kwargs: Any) -> QuantizedTensor:  # noqa: A002
    return functional_ops.in_float(lambda x: floats.avg_pool3d(x, *args, **kwargs), input, what="avg_pool3d")


def adaptive_avg_pool2d(input: Tensor, output_size: Any) -> QuantizedTensor:  # noqa: A002
    return functional_ops.in_float(
        lambda x: floats.adaptive_avg_pool2d(x, output_size), input, what="adaptive_avg_pool2d"
    )


def adaptive_avg_pool3d(input: Tensor, output_size: Any) -> QuantizedTensor:  # noqa: A002
    return functional_ops.in_float(
        lambda x: floats.adaptive_avg_pool3d(x, output_size), input, what="adaptive_avg_pool3d"
    )


def interpolate(
    input: Tensor,  # noqa: A002
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> QuantizedTensor:
    return functional_ops.in_float(
        lambda x: floats.interpolate(x, size, scale_factor, mode, align_corners), input, what="interpolate"
    )


upsample = interpolate


def upsample_bilinear(input: Tensor, size: Any = None, scale_factor: Any = None) -> QuantizedTensor:  # noqa: A002
    return interpolate(input, size, scale_factor, "bilinear", True)


def upsample_nearest(input: Tensor, size: Any = None, scale_factor: Any = None) -> QuantizedTensor:  # noqa: A002
    return interpolate(input, size, scale_factor, "nearest")
