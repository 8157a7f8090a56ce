"""Dynamically quantized convolutions: onednn's kernel on x86, with the qparams of the integer form.

torch's own dynamic convolutions (fbgemm, QNNPACK) requantize results onto the input's grid and so clip everything
beyond the input's range. They are not used; on QNNPACK the integer form runs as written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.targets.kernels.conv_window import Window, shape_to_pack_for
from quantc.targets.kernels.dynamic_quantization import RunTimeGrid
from quantc.targets.kernels.int8_conv_base import two_axes
from quantc.targets.kernels.kernel import Kernel, Work
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.packing import bytes_on_grid

PREPACK: Any = torch.ops.onednn.qconv_prepack
CONV: Any = torch.ops.onednn.qconv_pointwise.default
TAKES_RELU = 2
"""Over how many axes a convolution may go for its kernel to do a relu."""


class ConvDynamic(Kernel):
    """Convolution of a float tensor, quantized per tensor at run time, by int8 weights."""

    name: ClassVar[str] = "onednn qconv"
    family: ClassVar[str] = "onednn"
    any_order: ClassVar[bool] = True

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, window: Window, grid: RunTimeGrid) -> None:
        super().__init__()
        self.grid = grid
        self.window = window
        self.shape = tuple(weight.shape)
        """Shape of the weight, which is dropped when it is packed."""
        self.relu = False
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def pack(self) -> Any:
        return self._pack_for(None)

    def pack_for(self, *inputs: Tensor) -> Any:
        return self._pack_for(shape_to_pack_for(self.window, self.shape, inputs[0]))

    def _pack_for(self, shape: list[int] | None) -> Any:
        weight, window = two_axes(self.get_buffer("weight")), self.window.wide.arguments
        scale = self.get_buffer("scale").expand(weight.shape[0]).contiguous()
        packed = PREPACK(weight, scale, 1.0, 0, *window, shape)
        return packed, scale, torch.zeros(weight.shape[0], dtype=torch.int32), self.optional_buffer("bias"), window

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": packed[0].to_dense().reshape(self.shape)}

    def work(self, *inputs: Tensor) -> Work | None:
        found = self.window.work(inputs[0].shape, self.shape)
        return replace(found, kind=f"{found.kind} dynamic")

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0].to(torch.float32)
        if x.dim() == self.window.axes + 2:
            return self._of_batch(packed, x)
        self.window.check(x, self.name)
        return self._of_batch(packed, x.unsqueeze(0)).squeeze(0)

    def _of_batch(self, packed: Any, x: Tensor) -> Tensor:
        weight, scale, zeros, bias, window = packed
        if not x.numel():
            return self.window.empty(x, self.shape, torch.float32)
        found = self.grid.of_whole(x)
        if found is None:
            return self.window.empty(x, self.shape, torch.float32).fill_(torch.nan)
        levels = self.window.images(bytes_on_grid(x, *found, self.grid.span))
        does_relu = self.relu and self.window.axes <= TAKES_RELU
        activation: tuple[Any, ...] = ("relu" if does_relu else "none", [], "")
        made: Tensor = CONV(levels, *found, weight, scale, zeros, bias, *window, 1.0, 0, torch.float32, *activation)
        made = self.window.like_input(made)
        if self.relu and not does_relu:
            made.relu_()
        return made.contiguous() if self.in_order else made

    def absorb(self, op: str) -> bool:
        if op != "relu":
            return False
        self.relu = True
        return True

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        return self.plain_buffers()["weight"], self.grid.span

    def extra_repr(self) -> str:
        return f"{self.name}{', relu' if self.relu else ''}"


@kernel("x86", "conv_dynamic")
def onednn(call: Call) -> Kernel:
    weight, bias = call.tensor("w"), call["bias"]
    if call["w_zero_point"] is not None:
        raise NoKernelError("its weights are not symmetric")
    if bias is not None and not isinstance(bias, Tensor):
        raise NoKernelError("its bias is not a constant")
    if weight.dtype is not torch.int8:
        raise NoKernelError(f"the kernel takes weights of int8, not {weight.dtype}")
    if not weight.numel():
        raise NoKernelError("its weight is empty")
    window = Window.of(call, weight.dim() - 2)
    window.check_onednn(call.node.args[0], weight.shape[2:], weight.shape[1])
    return ConvDynamic(weight, call.tensor("w_scale"), bias, window, RunTimeGrid.of(call))


@kernel("qnnpack", "conv_dynamic")
def qnnpack(call: Call) -> Kernel:
    raise NoKernelError("torch's kernel cuts results off at the range of what it reads")
