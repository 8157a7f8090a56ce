"""Epilogue arguments (multiplier, zero point, clamp, dtype) of an integer conv, linear or matmul, as float kernels take them.

The integer form multiplies accumulators by M = sx·sw/so and rounds. Kernels take the three scales separately, but only
their quotient matters: input and output scale are 1 here, and the weight's scale is M.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.targets.kernels.kernel_table import Call, NoKernelError


@dataclass(frozen=True)
class Ending:
    """Epilogue: multiplier, and zero point, clamp bounds and dtype of the result."""

    multiplier: Tensor
    """float32: one, or one for each channel."""
    zero_point: int
    low: int
    """The smallest level; bounds of an activation are in it."""
    high: int
    dtype: torch.dtype
    scale: float = 1.0
    """The size of a step: other than 1 where what comes before the rounding needs real numbers, as the multiplier's are."""

    @staticmethod
    def of(call: Call, multiplier: Tensor | None = None) -> Ending:
        """Epilogue of a call; `multiplier` selects one where the op has several."""
        if call["shift"] is not None:
            raise NoKernelError("its multipliers are mantissas and shifts, and kernels multiply by floats")
        factor = call["multiplier"] if multiplier is None else multiplier
        if not isinstance(factor, Tensor):
            raise NoKernelError("its accumulator is read as it is")
        dtype = call["dtype"]
        if dtype not in (torch.uint8, torch.int8, torch.float32):
            raise NoKernelError(f"kernels yield bytes or float32, not {dtype}")
        return Ending(factor.reshape(-1).float(), call["out_zero_point"], call["qmin"], call["qmax"], dtype)

    @property
    def is_float(self) -> bool:
        return self.dtype is torch.float32

    @property
    def cuts(self) -> bool:
        """True if the clamp is tighter than the dtype's range."""
        if self.is_float:
            return False
        limits = torch.iinfo(self.dtype)
        return (self.low, self.high) != (limits.min, limits.max)

    @property
    def is_relu(self) -> bool:
        """True if the only clamp is at zero."""
        return self.cuts and self.low == self.zero_point and self.high == torch.iinfo(self.dtype).max

    def by_channel(self, channels: int) -> Tensor:
        """Multipliers expanded to one per channel."""
        return self.multiplier.expand(channels).contiguous()

    def bias(self, levels: Tensor | None) -> Tensor | None:
        """The bias in steps of the result."""
        return None if levels is None else (levels.double().reshape(-1) * self.multiplier.double()).float()
