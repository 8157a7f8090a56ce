"""Products of two activations. No kernel multiplies batches of bytes, and the factors are small: they are brought to
float32, where sums of some hundred products of bytes are exact, and the result is rounded in one go."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.kernels.ending import Ending
from quantc.kernels.engines import as_quantized, hush, to_bytes
from quantc.kernels.packed import Kernel
from quantc.kernels.table import Call, NoKernelError, kernel


class Matmul(Kernel):
    """A product of matrices of bytes, or of batches of them."""

    name: ClassVar[str] = "float32 matmul"
    any_order: ClassVar[bool] = True

    def __init__(self, zero_points: tuple[int, int], ending: Ending) -> None:
        super().__init__()
        self.zero_points, self.ending = zero_points, ending
        self.factor = float(ending.multiplier)

    def pack(self) -> Any:
        hush()
        return 1.0 / self.factor, self.ending.zero_point, self.ending.dtype

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        ending = self.ending
        left, right = (
            as_quantized(x, 1.0, zero).dequantize() for x, zero in zip(inputs, self.zero_points, strict=True)
        )
        sums = torch.matmul(left, right)
        if ending.is_float:
            return sums.mul_(self.factor)
        made = to_bytes(sums, *packed)
        return made.clamp_(ending.low, ending.high) if ending.cuts else made


@kernel("x86", "matmul")
def matmul(call: Call) -> Kernel:
    factors = [call.node.args[0], call.node.args[2]]
    kinds = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in factors]
    if any(kind is None or kind.dtype is not torch.uint8 for kind in kinds):
        raise NoKernelError("the kernel multiplies uint8")
    zero = call["y_zero_point"]
    if isinstance(call["y"], Tensor) or call["bias"] is not None or (isinstance(zero, Tensor) and zero.numel() != 1):
        raise NoKernelError("a factor is a constant, or there is a bias")
    ending = Ending.of(call)
    if ending.multiplier.numel() != 1:
        raise NoKernelError("the result has a multiplier for each channel")
    return Matmul((call["x_zero_point"], 0 if zero is None else int(zero)), ending)
