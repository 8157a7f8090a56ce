"""Int8 convolutions: fbgemm's kernels on x86, which support asymmetric weights.

They read and write tensors of torch's quantized dtypes, which share memory with plain ones: converting there and back
takes 10 to 25 µs, about as much as a call is cheaper than one of onednn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_conv_base import ByteConv, check_bytes, two_axes
from quantc.targets.kernels.kernel import Kernel, KernelForm
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.packing import CONVS, CONVS_RELU, as_bytes, as_quantized, packed_conv, unpacked_conv

ROUNDED_BITS = 32
"""Bits of the integer that the kernels round to, before they saturate to a byte."""


class ConvFbgemm(ByteConv):
    """Convolution of uint8 by int8 weights, on fbgemm."""

    name: ClassVar[str] = "fbgemm qconv"
    family: ClassVar[str] = "fbgemm"

    def __init__(self, call: Call, ending: Ending) -> None:
        super().__init__(call, ending)
        self.post_op = "relu" if ending.is_relu else "none"
        self.op = (CONVS_RELU if ending.is_relu else CONVS)[self.window.wide.axes]

    def centered_rows(self) -> Tensor:
        rows = super().centered_rows()
        return rows if self.is_centered else rows - two_axes(self.get_buffer("zero_points"))

    def pack(self) -> Any:
        multiplier, bias = self.get_buffer("multiplier"), self.optional_buffer("bias")
        zeros = None if self.is_centered else self._by_output(self.get_buffer("zero_points").reshape(-1))
        return packed_conv("fbgemm", self.rows(), multiplier, zeros, bias, *self.window.wide.arguments)

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": self.plain(unpacked_conv(packed, self.window.wide.axes))}

    def convolved(self, packed: Any, *images: Tensor) -> Tensor:
        return as_bytes(self.op(as_quantized(images[0], 1.0, self.x_zero_point), packed, 1.0, self.ending.zero_point))

    def takes_quantized(self, rank: int) -> bool:
        return self.window.axes == 2 and rank == 4

    @property
    def gives_quantized(self) -> bool:
        return self.window.axes == 2 and not (self.ending.cuts and self.post_op not in self.bounded_by)

    def bound(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Any]:
        step = super().bound(packed, reads, yields)
        if reads is KernelForm.PLAIN and yields is KernelForm.PLAIN:
            return step
        zero_point = self.ending.zero_point

        def guarded(x: Tensor) -> Any:
            if x.numel() and x.dim() == 4:
                return step(x)
            made = self.run(packed, as_bytes(x) if reads is KernelForm.QUANTIZED else x)
            return as_quantized(made, 1.0, zero_point) if yields is KernelForm.QUANTIZED else made

        return guarded

    def bound_convolution(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Tensor]:
        op, zero_point, ends = self.op, self.x_zero_point, self.ending.zero_point
        if reads is KernelForm.PLAIN and yields is KernelForm.PLAIN:
            return lambda x: as_bytes(op(as_quantized(x, 1.0, zero_point), packed, 1.0, ends))
        if reads is KernelForm.PLAIN:
            return lambda x: op(as_quantized(x, 1.0, zero_point), packed, 1.0, ends)
        if yields is KernelForm.PLAIN:
            return lambda x: as_bytes(op(x, packed, 1.0, ends))
        return lambda x: op(x, packed, 1.0, ends)


def fbgemm_ending(call: Call) -> Ending:
    """Epilogue of an op, if fbgemm's kernels support it."""
    ending = Ending.of(call)
    if ending.dtype is not torch.uint8:
        raise NoKernelError(f"fbgemm's convolutions yield uint8, not {ending.dtype}")
    return ending


@kernel("x86", "conv")
def fbgemm(call: Call) -> Kernel:
    check_bytes(call, "fbgemm")
    made = ConvFbgemm(call, fbgemm_ending(call))
    made.check_reach(ROUNDED_BITS)
    if call["w_zero_point"] is not None:
        made.check_pairs()
    return made
