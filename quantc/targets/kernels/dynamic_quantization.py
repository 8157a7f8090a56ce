"""Fast dynamic quantization of kernel inputs, with the same qparams as `choose_qparams`.

Kernels multiply unsigned levels, so a grid with another lower bound is shifted to start at 0, which changes no value.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quantc.targets.kernels.kernel_table import Call, NoKernelError

HIGHEST_LEVEL = 255
"""The most that an unsigned byte holds."""


def float32(number: float) -> float:
    """A number rounded to float32.

    Rounding a sum, difference, product or quotient of two float32 numbers to float64 first does not change its float32
    value.
    """
    return ctypes.c_float(number).value


@dataclass(frozen=True)
class RunTimeGrid:
    """Levels 0..span with qparams found at run time."""

    span: int
    """The highest level."""
    middle: int | None
    """The zero point of a grid that is symmetric about it; None if it is affine."""
    eps: float
    """The smallest scale."""

    @staticmethod
    def of(call: Call) -> RunTimeGrid:
        """Grid of the input of a dynamic integer op."""
        qmin, qmax, zero_point = call["qmin"], call["qmax"], call["x_zero_point"]
        if qmax - qmin > HIGHEST_LEVEL:
            raise NoKernelError(f"the kernel multiplies bytes, and {qmin}..{qmax} needs more")
        middle = None if zero_point is None else zero_point - qmin
        return RunTimeGrid(qmax - qmin, middle, float32(call["eps"]))

    def of_whole(self, x: Tensor) -> tuple[float, int] | None:
        """Scale and zero point of a non-empty float32 tensor; None if it is not finite."""
        lowest, highest = torch.aminmax(x)
        # NaN propagates: min and max return their first argument if the comparison is false
        low, high = min(lowest.item(), 0.0), max(highest.item(), 0.0)
        if self.middle is None:
            scale = max(float32(float32(high - low) / self.span), self.eps)
            if not scale < math.inf:
                return None
            return scale, min(-round(float32(low / scale)), self.span)
        scale = max(float32(max(-low, high) / (self.span / 2)), self.eps)
        return (scale, self.middle) if scale < math.inf else None

    def of_rows(self, x: Tensor) -> Rows:
        """Rows of a float32 matrix, each divided by its own scale.

        The scale of a non-finite row is non-finite too. `torch.aminmax` would take ten times as long by rows.
        """
        low, high = torch.amin(x, -1, True).clamp_(max=0), torch.amax(x, -1, True).clamp_(min=0)
        if self.middle is None:
            scale = (high - low).div_(self.span).clamp_(min=self.eps)
            lowest = low.div_(scale).round_()
            # no step rounds to less than 0, and none to more than one above the highest, if it is halfway to it
            return Rows((x * scale.reciprocal()).sub_(lowest), scale, lowest)
        scale = torch.maximum(low.neg_(), high).div_(self.span / 2).clamp_(min=self.eps)
        steps = (x * scale.reciprocal()).clamp_(-self.middle, self.span - self.middle)
        return Rows(steps, scale, None)


@dataclass(frozen=True)
class Rows:
    """A matrix with one scale per row, in units of that scale."""

    steps: Tensor
    """Not yet rounded: from 0 if `lowest` says which number the level 0 stands for, else about 0."""
    scale: Tensor
    lowest: Tensor | None
    """The steps that level 0 of a row stands for; None if they are about zero already."""
