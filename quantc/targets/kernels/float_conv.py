"""Int8 convolutions computed in float32: levels are converted to float, convolved by oneDNN's float kernel, and rounded.

Weights are not packed: a weight packed for one input shape is many times slower for others.

For 8-bit results the multipliers are folded into the weights, so that only rounding is left: the error of float32 sums
is far below one step. For float results they are applied afterwards, and integer sums are exact up to 2^24.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.targets.kernels.conv_window import FORMATS
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_conv_base import ByteConv, check_bytes, two_axes
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.packing import as_quantized, to_bytes


class ConvFloat(ByteConv):
    """Convolution of uint8 by int8 weights, in float32."""

    name: ClassVar[str] = "float32 conv"
    family: ClassVar[str] = "float32"
    computes_in_float: ClassVar[bool] = True

    def pack(self) -> Any:
        window, bias = self.window.wide, self.optional_buffer("bias")
        numbers = self.rows().float()
        if not self.is_centered:
            numbers = numbers - two_axes(self.get_buffer("zero_points"))
        multiplier = self.get_buffer("multiplier")
        if not self.ending.is_float:
            numbers = numbers * self._for_axes(multiplier, 1)
        sizes = (window.padding, window.stride, window.dilation, window.groups)
        weight = numbers.contiguous(memory_format=FORMATS[window.axes])
        if not self.ending.is_float:
            return weight, bias, sizes, None, None
        return weight, None, sizes, self._for_axes(multiplier), None if bias is None else self._for_axes(bias)

    def _for_axes(self, values: Tensor, before: int = 0) -> Tensor:
        """A number for each output, to go with the axes of a result; with `before` axes more, with those of a weight."""
        return values.reshape(-1, *[1] * (self.window.wide.axes + before))

    def convolved(self, packed: Any, *images: Tensor) -> Tensor:
        weight, bias, sizes, multiplier, added = packed
        ending = self.ending
        numbers = as_quantized(images[0], 1.0, self.x_zero_point).dequantize()
        made = torch.mkldnn_convolution(numbers, weight, bias, *sizes)
        if multiplier is None:
            return to_bytes(made, 1.0, ending.zero_point, ending.dtype)
        made.mul_(multiplier)
        return made if added is None else made.add_(added)


@kernel("x86", "conv")
def in_float(call: Call) -> Kernel:
    check_bytes(call, "the kernel")
    ending = Ending.of(call)
    if ending.is_float and call["parts"] != 1:
        raise NoKernelError("its sums go beyond the integers that float32 holds")
    made = ConvFloat(call, ending)
    made.check_onednn(call)
    return made
