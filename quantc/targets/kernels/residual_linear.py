"""Linear layers with a fused residual add of float results, as in transformer branches: onednn adds as it writes,
bit-identical to the two ops.

It adds in place if this is the summand's last use; otherwise the result is new memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.targets.kernels.int8_linear import FEW_ROWS, OnOnednn
from quantc.targets.kernels.kernel import KernelForm

BINARY: Any = torch.ops.onednn.qlinear_pointwise.binary


class LinearSum(OnOnednn):
    """Linear layer with float result and fused add."""

    name: ClassVar[str] = "onednn qlinear + sum"
    keep = True
    """False if the kernel may overwrite the summand; `overwrite-summands` sets it."""

    @staticmethod
    def of(layer: OnOnednn) -> LinearSum:
        made = LinearSum(layer.plain, layer.reading, layer.ending)
        made.in_order = layer.in_order
        return made

    @property
    def joins(self) -> None:
        return None

    @property
    def written_over(self) -> int | None:
        return None if self.keep else 1

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, other = inputs
        if x.dim() > 1 and x.numel() > FEW_ROWS * self.shape[1]:
            return self.summed(packed)(self.reading.levels(x), other)
        return super().run(packed, x).add_(other)

    def summed(self, packed: Any) -> Callable[[Tensor, Tensor], Tensor]:
        """Fused GEMM and add, on uint8 levels."""
        weight, multiplier, zeros, bias, *result = packed[2]
        before = (1.0, self.reading.zero_point, weight, multiplier, zeros)
        scale, zero_point, dtype, *_ = result
        how = "add" if self.keep else "sum"
        after: tuple[Any, ...] = (bias, scale, zero_point, dtype, 1.0, 0, how, 1.0, "none", [], "")
        return lambda levels, other: BINARY(levels.contiguous(), *before, other.contiguous(), *after)

    def bound(self, packed: Any, reads: KernelForm, yields: KernelForm) -> Callable[..., Any]:
        summed, levels_of, most_of_few = self.summed(packed), self.reading.levels, FEW_ROWS * self.shape[1]

        def step(x: Tensor, other: Tensor) -> Any:
            if x.dim() < 2 or x.numel() <= most_of_few:
                return self.run(packed, x, other)
            return summed(levels_of(x), other)

        return step
