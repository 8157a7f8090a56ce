"""Products of two tensors that are both computed, where one of them comes with its rows as columns, or a bias is added.

QNNPACK multiplies with constant weights alone: it packs them. These run in float32, as other products of two do.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.kernels.ending import Ending
from quantc.kernels.engines import as_quantized, to_bytes
from quantc.kernels.packed import Kernel
from quantc.kernels.static_matmul import Matmul
from quantc.kernels.table import Call, NoKernelError, kernel
from quantc.types import dtype_of

FACTORS = {"linear": "w", "matmul": "y"}
"""What ops call the second factor."""


class MatmulBias(Matmul):
    """A product of bytes, to which a bias in steps of the accumulator may be added."""

    name: ClassVar[str] = "float32 matmul + bias"

    def __init__(self, zero_points: tuple[int, int], ending: Ending, bias: Tensor | None, op: str) -> None:
        super().__init__(zero_points, ending)
        self.register_buffer("bias", None if bias is None else bias.float())
        self.rows = op == "linear"
        """Whether the second factor has a row for each result."""

    def pack(self) -> Any:
        return super().pack(), self.optional_buffer("bias")

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        grid, bias = packed
        ending = self.ending
        left, right = (
            as_quantized(x, 1.0, zero).dequantize() for x, zero in zip(inputs, self.zero_points, strict=True)
        )
        sums = torch.matmul(left, right.transpose(-1, -2) if self.rows else right)
        if bias is not None:
            sums = sums.add_(bias) if bias.dim() <= sums.dim() else sums + bias
        if ending.is_float:
            return sums.mul_(self.factor)
        made = to_bytes(sums, *grid)
        return made.clamp_(ending.low, ending.high) if ending.cuts else made


@kernel("qnnpack", *FACTORS)
def matmul_bias(call: Call) -> Kernel:
    other = FACTORS[call.op]
    bias, zero = call["bias"], call[f"{other}_zero_point"]
    if isinstance(call[other], Tensor):
        raise NoKernelError("a factor is a constant")
    if bias is not None and not isinstance(bias, Tensor):
        raise NoKernelError("its bias is not a constant")
    if any(dtype_of(node) is not torch.uint8 for node in call.inputs):
        raise NoKernelError("the kernel multiplies uint8")
    ending = Ending.of(call)
    if ending.multiplier.numel() != 1 or (isinstance(zero, Tensor) and zero.numel() != 1):
        raise NoKernelError("it has a multiplier or a zero point for each channel")
    return MatmulBias((call["x_zero_point"], 0 if zero is None else int(zero)), ending, bias, call.op)
