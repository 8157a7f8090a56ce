"""8-bit sums and means over whole axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.ir.types import tensor_type
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_elementwise import Rounding, check_bytes, one_number
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel


class SumOver(Rounding):
    """Int32 sum of levels; the zero point's share is subtracted from the results, which are few."""

    name: ClassVar[str] = "int32 sum"

    def __init__(self, dims: Sequence[int], keepdim: bool, excess: int, multiplier: float, ending: Ending) -> None:
        super().__init__(ending)
        self.axes = (list(dims), keepdim)
        self.excess, self.multiplier = excess, multiplier

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        dims, keepdim = self.axes
        sums = inputs[0].sum(dims, keepdim, dtype=torch.int32).sub_(self.excess).float()
        if self.ending.is_float:
            sums.mul_(self.multiplier)
        return self.settled(sums, 1.0 / self.multiplier)


@kernel("x86", "sum_over")
def sum_over(call: Call) -> Kernel:
    check_bytes(call.node.args[0])
    kind = tensor_type(call.node.args[0])
    dims: Any = call["dims"]
    zero_point: int = call["x_zero_point"]
    count = 1
    for dim in dims:
        size = None if kind is None else kind.shape[dim]
        if not isinstance(size, int):
            raise NoKernelError("how many elements it adds is not known before it runs")
        count *= size
    if kind is not None and not dims and kind.rank:
        raise NoKernelError("it adds nothing")  # torch takes no axes for all axes
    if count * (1 + 255) >= 2**31:
        raise NoKernelError("its sums may leave an int32 before the zero point is taken off")
    multiplier = one_number(call, call["multiplier"])
    return SumOver(dims, call["keepdim"], count * zero_point, multiplier, Ending.of(call))
