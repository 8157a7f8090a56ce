"""Int8 linear layers and convolutions on QNNPACK, for Arm and x86.

QNNPACK subtracts zero points in 16 bits and accumulates in 32, so that no sum saturates, multiplies by a float32 per
channel, and rounds to even: as the integer form does, as long as sum times multiplier fits 32 bits. Weights may be
asymmetric. A packed weight knows its engine, so no process-wide engine is set.

torch keeps the original weight beside the packed one, and there is no way to release it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.ir.dialect import ops_in
from quantc.ir.op_row import Family
from quantc.ir.types import TensorType
from quantc.spec.instruction_sets import SIGN_SHIFT
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError
from quantc.targets.kernels.packing import (
    as_bytes,
    as_quantized,
    packed_for_qnnpack,
    product_with_packed,
    unpacked_by_qnnpack,
)

BYTES = (torch.uint8, torch.int8)
HIGHEST_LEVEL = 255
ROUNDED_BITS = 31
"""Bits of the integer that the kernels round to, before they saturate to a byte: beyond it they give the lowest
level."""


@dataclass(frozen=True)
class QnnpackLayer:
    """A conv or linear as QNNPACK takes it."""

    op: str
    """`linear`, `conv2d`, `conv_transpose1d`, …."""
    levels: Tensor
    """The weight, as int8."""
    zero_points: Tensor | None
    ending: Ending
    bias: Tensor | None
    """In steps of the accumulator."""
    x_zero_point: int
    x_dtype: torch.dtype
    window: tuple[Any, ...]
    """Stride, padding and so on, in the order of torch's op that packs."""

    @staticmethod
    def of(call: Call, op: str, levels: Tensor, zero_points: Tensor | None, *window: Any) -> QnnpackLayer:
        """Layer of a call; NoKernelError with the reason if QNNPACK does not support it."""
        kind, bias = type_of_first(call), call["bias"]
        if kind is None or kind.dtype not in BYTES:
            raise NoKernelError("QNNPACK multiplies bytes")
        if levels.dtype not in BYTES or not levels.numel():
            raise NoKernelError("QNNPACK takes weights of one byte, and at least one of them")
        if bias is not None and not isinstance(bias, Tensor):
            raise NoKernelError("its bias is not a constant")
        ending = Ending.of(call)
        if ending.is_float:
            raise NoKernelError(
                "QNNPACK yields bytes, not float32, unless it finds the scale of what it reads as it runs"
            )
        shift = SIGN_SHIFT if levels.dtype is torch.uint8 else 0
        if shift:
            levels = (levels.to(torch.int16) - shift).to(torch.int8)
            zero_points = torch.zeros(()) if zero_points is None else zero_points
        zeros = None if zero_points is None else zero_points.reshape(-1).long() - shift
        layer = QnnpackLayer(op, levels, zeros, ending, bias, call["x_zero_point"], kind.dtype, window)
        layer.check()
        return layer

    @property
    def is_transposed(self) -> bool:
        return "transpose" in self.op

    @property
    def channels(self) -> int:
        """Number of output channels."""
        return self.levels.shape[1] * self.window[-1] if self.is_transposed else self.levels.shape[0]

    @property
    def channels_read(self) -> int:
        """Number of input channels."""
        first, second = self.levels.shape[:2]
        return first if self.is_transposed else second * (self.window[-1] if self.window else 1)

    def for_channels(self, values: Tensor) -> Tensor:
        """Scales or zero points as packed: one per output channel.

        Output channels of a grouped transposed convolution are on no axis of its weight: it has one of each.
        """
        if self.is_transposed and self.window[-1] > 1:
            return values.reshape(())
        return values.expand(self.channels).contiguous()

    def check(self) -> None:
        """Refuse layers that the kernels compute wrongly."""
        multiplier = self.ending.multiplier
        if self.is_transposed and self.window[-1] > 1 and max(multiplier.numel(), self.zeros) > 1:
            raise NoKernelError("in transposed convolutions with groups QNNPACK has one scale for the whole weight")
        if not bool((multiplier >= torch.finfo(torch.float32).tiny).all() and multiplier.isfinite().all()):
            raise NoKernelError("QNNPACK multiplies by normal float32 above 0")
        if float(self.reach().max()) >= 2.0**ROUNDED_BITS:
            raise NoKernelError(
                f"its sums may exceed the range of its result so far that {ROUNDED_BITS} bits do not hold them"
            )

    @property
    def zeros(self) -> int:
        """Number of weight zero points."""
        return 0 if self.zero_points is None else self.zero_points.numel()

    def reach(self) -> Tensor:
        """Largest absolute sum, in steps of the result, per channel."""
        wide = self.levels.double()
        if self.zero_points is not None:
            shape = [1] * wide.dim()
            shape[1 if self.is_transposed else 0] = -1
            wide = wide - self.zero_points.reshape(shape)
        rows = wide.transpose(0, 1) if self.is_transposed else wide
        largest = rows.abs().flatten(1).sum(dim=1)
        if largest.numel() != self.channels:  # groups of a transposed convolution: any of them
            largest = largest.max().expand(self.channels)
        zero = self.x_zero_point + (SIGN_SHIFT if self.x_dtype is torch.int8 else 0)
        sums = largest * max(zero, HIGHEST_LEVEL - zero)
        sums = sums if self.bias is None else sums + self.bias.reshape(-1).double().abs()
        return sums * self.ending.multiplier.double()


def type_of_first(call: Call) -> TensorType | None:
    """Type of a call's first argument; None if unknown."""
    x = call.node.args[0]
    found = x.meta.get("val") if isinstance(x, fx.Node) else None
    return found if isinstance(found, TensorType) else None


WITH_RELU = ("linear", *ops_in(Family.CONV))
"""The kernels that begin their range at zero where they are asked to."""


class QnnpackProduct(Kernel):
    """Conv or linear of 8-bit tensors by an 8-bit weight, requantized.

    The kernels read and write uint8. Int8 is shifted, which changes no value.
    """

    family: ClassVar[str] = "qnnpack"
    any_order: ClassVar[bool] = True

    def __init__(self, layer: QnnpackLayer) -> None:
        super().__init__()
        ending, zeros = layer.ending, layer.zero_points
        self.register_buffer("weight", layer.levels)
        self.register_buffer("multiplier", layer.for_channels(ending.multiplier))
        self.register_buffer("zero_points", None if zeros is None else layer.for_channels(zeros))
        self.register_buffer("bias", ending.bias(layer.bias))
        self.op, self.window = layer.op, layer.window
        self.sizes = (layer.channels_read, layer.channels)
        """Numbers of channels before and after."""
        self.x_shift, self.shift = (SIGN_SHIFT if dtype is torch.int8 else 0 for dtype in (layer.x_dtype, ending.dtype))
        self.x_zero_point = layer.x_zero_point + self.x_shift
        self.zero_point = ending.zero_point + self.shift
        self.does_relu = ending.is_relu and layer.op in WITH_RELU
        self.bounds = (ending.low + self.shift, ending.high + self.shift)
        self.cuts = ending.cuts and not self.does_relu

    def as_packed(self) -> tuple[Tensor, tuple[Any, ...]]:
        """Weight and window to pack."""
        return self.get_buffer("weight"), self.window

    def pack(self) -> Any:
        weight, window = self.as_packed()
        zero_points, bias = (self.optional_buffer(name) for name in ("zero_points", "bias"))
        packed = packed_for_qnnpack(self.op, weight, self.get_buffer("multiplier"), zero_points, bias, *window)
        return product_with_packed(f"{self.op}_relu" if self.does_relu else self.op), packed

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        found = unpacked_by_qnnpack(self.op, packed[1])
        return {} if found is None else {"weight": self.as_given(found)}

    def as_given(self, weight: Tensor) -> Tensor:
        """Inverse of `as_packed`: the original weight."""
        return weight

    def multiplied(self, packed: Any, x: Tensor) -> Tensor:
        """Run the kernel on uint8 in its memory format."""
        function, weight = packed
        made = as_bytes(function(as_quantized(x, 1.0, self.x_zero_point), weight, 1.0, self.zero_point))
        if self.cuts:
            made.clamp_(*self.bounds)
        return made.bitwise_xor_(self.shift).view(torch.int8) if self.shift else made

    def unsigned(self, x: Tensor) -> Tensor:
        return x.view(torch.uint8).bitwise_xor(self.x_shift) if self.x_shift else x
