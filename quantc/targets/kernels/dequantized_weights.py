"""Int8 weights of float ops, such as recurrent layers whose state stays float: dequantized once.

Dequantizing at every call takes half as long as the layer itself. So memory holds the weight in float32 only: speed and
memory of the float model. Files hold int8.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.qdq.registration import decomposed_ops
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel

PER_CHANNEL: Any = decomposed_ops().dequantize_per_channel.default


class RealWeight(Kernel):
    """A quantized constant, dequantized once."""

    name: ClassVar[str] = "float32 weight made once"

    def __init__(self, levels: Tensor, scales: Tensor, zero_points: Tensor | None, axis: int, *rest: Any) -> None:
        super().__init__()
        self.register_buffer("levels", levels)
        self.register_buffer("scales", scales)
        self.register_buffer("zero_points", zero_points)
        self.axis, self.rest = axis, rest

    def pack(self) -> Any:
        grid = (self.get_buffer("scales"), self.optional_buffer("zero_points"))
        return PER_CHANNEL(self.get_buffer("levels"), *grid, self.axis, *self.rest)

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        shape = [-1 if axis == self.axis % packed.dim() else 1 for axis in range(packed.dim())]
        zeros = self.optional_buffer("zero_points")
        levels = (packed.double() / self.get_buffer("scales").double().reshape(shape)).round_()
        shifted = levels if zeros is None else levels.add_(zeros.reshape(shape))
        return {"levels": shifted.to(self.rest[-1])}

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return packed


def made_once(call: Call) -> Kernel:
    levels, scales, zeros, axis, *rest = call.node.args
    if call.node.kwargs.get("out_dtype") not in (None, torch.float32):
        raise NoKernelError("it is not brought back to float32")
    grid = [call.program.tensor(item) for item in (levels, scales, zeros)]  # type: ignore[arg-type]
    if grid[0] is None or grid[1] is None or (zeros is not None and grid[2] is None):
        raise NoKernelError("what is brought back is computed")
    return RealWeight(grid[0].detach(), grid[1].detach(), None if grid[2] is None else grid[2].detach(), axis, *rest)  # type: ignore[arg-type]


for target in ("x86", "qnnpack"):
    kernel(target, "quantized_decomposed.dequantize_per_channel.default")(made_once)
