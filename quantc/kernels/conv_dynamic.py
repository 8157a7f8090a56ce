"""Convolutions that find the scale of what they read as they run: onednn's kernel on x86, with the integer form's scales.

torch's own dynamic convolutions, of fbgemm and of QNNPACK, put their results on the grid of what they read: whatever
lies beyond the range of the input is cut off. So they are not used, and on QNNPACK the integer form runs as written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.errors import InputError
from quantc.kernels.engines import bytes_on_grid, quiet
from quantc.kernels.packed import Kernel
from quantc.kernels.run_time_grid import RunTimeGrid
from quantc.kernels.table import Call, NoKernelError, kernel

PREPACK: Any = torch.ops.onednn.qconv_prepack
CONV: Any = torch.ops.onednn.qconv_pointwise
TAKES_RELU = (1, 2)
"""Over how many axes a convolution may go for its kernel to do a relu."""
FORMATS: dict[int, torch.memory_format] = {2: torch.channels_last, 3: torch.channels_last_3d}
"""The order in memory that the kernel wants, by the number of axes it goes over."""


@dataclass(frozen=True)
class Window:
    """How a convolution goes over what it reads."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    @staticmethod
    def of(call: Call, axes: int) -> Window:
        given = [call[name] for name in ("stride", "padding", "dilation")]
        if any(not isinstance(size, int) for sizes in given for size in sizes):
            raise NoKernelError("its window is not known before it runs")
        stride, padding, dilation = (list(sizes) * (axes if len(sizes) == 1 else 1) for sizes in given)
        return Window(stride, padding, dilation, call["groups"])

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.groups


class ConvDynamic(Kernel):
    """A convolution of a float tensor, quantized with one scale as it comes, by int8 weights."""

    name: ClassVar[str] = "onednn qconv"

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, window: Window, grid: RunTimeGrid) -> None:
        super().__init__()
        self.grid = grid
        self.window = window
        self.axes = weight.dim() - 2
        self.relu = False
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def pack(self) -> Any:
        weight = self.get_buffer("weight")
        scale = self.get_buffer("scale").expand(weight.shape[0]).contiguous()
        quiet()
        packed = PREPACK(weight, scale, 1.0, 0, *self.window.arguments, None)
        return packed, scale, torch.zeros(weight.shape[0], dtype=torch.int32), self.optional_buffer("bias")

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0].to(torch.float32)
        if x.dim() == self.axes + 1:
            return self._of_batch(packed, x.unsqueeze(0)).squeeze(0)
        if x.dim() != self.axes + 2:
            raise InputError(
                f"{self.name} was given a tensor of shape {tuple(x.shape)}, and goes over {self.axes} axes",
                where="what it reads",
                advice="call the lowered module with inputs of the shapes it was captured for",
            )
        return self._of_batch(packed, x)

    def _of_batch(self, packed: Any, x: Tensor) -> Tensor:
        weight, scale, zeros, bias = packed
        if not x.numel():
            return self._shaped(x, 0.0)
        found = self.grid.of_whole(x)
        if found is None:
            return self._shaped(x, torch.nan)
        levels = bytes_on_grid(x, *found, self.grid.span)
        if self.axes in FORMATS:
            levels = levels.contiguous(memory_format=FORMATS[self.axes])
        does_relu = self.relu and self.axes in TAKES_RELU
        layer = (weight, scale, zeros, bias, *self.window.arguments)
        activation: tuple[Any, ...] = ("relu" if does_relu else "none", [], "")
        result: Tensor = CONV(levels, *found, *layer, 1.0, 0, torch.float32, *activation)
        if self.relu and not does_relu:
            result.relu_()
        return result.contiguous() if self.in_order else result

    def _shaped(self, x: Tensor, value: float) -> Tensor:
        """A result of the right shape, with a number in all places; shapes that do not fit are torch's to refuse."""
        window, empty = self.window, torch.empty(self.get_buffer("weight").shape, device="meta")
        sizes = (window.stride, window.padding, window.dilation, False, [0] * self.axes, window.groups)
        shape = torch.convolution(x.to("meta"), empty, None, *sizes).shape
        return x.new_full(shape, value)

    def absorb(self, op: str) -> bool:
        if op != "relu":
            return False
        self.relu = True
        return True

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        return self.get_buffer("weight"), self.grid.span

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
    return ConvDynamic(weight, call.tensor("w_scale"), bias, window, RunTimeGrid.of(call))


@kernel("qnnpack", "conv_dynamic")
def qnnpack(call: Call) -> Kernel:
    raise NoKernelError("torch's kernel cuts results off at the range of what it reads")
