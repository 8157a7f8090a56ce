"""Matmuls of two activations. No kernel multiplies batches of 8-bit matrices, and the operands are small: they are
dequantized to float32, where sums of some hundred 8-bit products are exact, and the result is requantized in one op.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.ir.types import dtype_of
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.packing import as_quantized, to_bytes

FACTORS = {"matmul": "y", "linear": "w"}
"""The name of the second factor, by op."""
ROWS = "linear"
"""The op whose second factor has a row for each result; those of the other are columns."""


class Matmul(Kernel):
    """(Batched) matmul of 8-bit matrices, with an optional bias in steps of the accumulator."""

    name: ClassVar[str] = "float32 matmul"
    any_order: ClassVar[bool] = True

    def __init__(self, op: str, zero_points: tuple[int, int], bias: Tensor | None, ending: Ending) -> None:
        super().__init__()
        self.register_buffer("bias", None if bias is None else bias.float())
        self.is_of_rows = op == ROWS
        self.zero_points, self.ending = zero_points, ending
        self.factor = float(ending.multiplier)

    def pack(self) -> Any:
        return self.optional_buffer("bias"), (1.0 / self.factor, self.ending.zero_point, self.ending.dtype)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        (bias, grid), ending = packed, self.ending
        left, right = (
            as_quantized(x, 1.0, zero).dequantize() for x, zero in zip(inputs, self.zero_points, strict=True)
        )
        sums = torch.matmul(left, right.transpose(-1, -2) if self.is_of_rows else right)
        if bias is not None:
            sums = sums + bias  # which may have more axes
        if ending.is_float:
            return sums.mul_(self.factor)
        made = to_bytes(sums, *grid)
        return made.clamp_(ending.low, ending.high) if ending.cuts else made


@kernel("x86", *FACTORS)
def matmul(call: Call) -> Kernel:
    other = FACTORS[call.op]
    bias, zero = call["bias"], call[f"{other}_zero_point"]
    if isinstance(call["x"], Tensor) or isinstance(call[other], Tensor):
        raise NoKernelError("a factor is a constant")
    if bias is not None and not isinstance(bias, Tensor):
        raise NoKernelError("its bias is not a constant")
    if any(dtype_of(node) is not torch.uint8 for node in call.inputs):
        raise NoKernelError("the kernel multiplies uint8")
    ending = Ending.of(call)
    if ending.multiplier.numel() != 1 or (isinstance(zero, Tensor) and zero.numel() != 1):
        raise NoKernelError("it has a multiplier or a zero point for each channel")
    return Matmul(call.op, (call["x_zero_point"], 0 if zero is None else int(zero)), bias, ending)
