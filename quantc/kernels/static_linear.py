"""Linear layers on bytes. fbgemm is the faster for few rows, onednn for many; both are packed when first needed."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.kernels.ending import Ending
from quantc.kernels.engines import as_bytes, as_quantized, packed_linear
from quantc.kernels.packed import Kernel
from quantc.kernels.table import Call, NoKernelError, highest_level, kernel

FEW_ROWS = 16
"""Up to so many rows fbgemm's kernel is taken."""


class Linear(Kernel):
    """A product of bytes with int8 weights, rounded onto the grid of its result."""

    name: ClassVar[str] = "fbgemm/onednn qlinear"
    any_order: ClassVar[bool] = True

    def __init__(self, call: Call, ending: Ending) -> None:
        super().__init__()
        weight = call.tensor("w")
        self.register_buffer("weight", weight)
        self.register_buffer("multiplier", ending.by_channel(weight.shape[0]))
        self.register_buffer("bias", ending.bias(call["bias"]))
        self.bias: Tensor | None
        self.ending = ending
        self.x_zero_point: int = call["x_zero_point"]
        self.highest = highest_level(call.node.args[0])
        self.post_op = "relu" if ending.is_relu else "none"

    @property
    def pair_sums(self) -> tuple[Tensor, int]:
        return self.get_buffer("weight"), self.highest

    def pack(self) -> Any:
        weight, multiplier = self.get_buffer("weight"), self.get_buffer("multiplier")
        packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        few = packed_linear("fbgemm", weight, multiplier, self.bias)
        return packed, multiplier, torch.zeros(1, dtype=torch.int32), self.bias, few

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, ending = inputs[0], self.ending
        if x.dim() == 1:
            return self.run(packed, x.unsqueeze(0)).squeeze(0)
        weight, multiplier, zeros, bias, few = packed
        rows = x.numel() // max(x.shape[-1], 1)
        if rows <= FEW_ROWS:
            made = self._on_fbgemm(few, x)
        else:
            made = torch.ops.onednn.qlinear_pointwise(
                x.contiguous(), 1.0, self.x_zero_point, weight, multiplier, zeros, bias,
                1.0, ending.zero_point, ending.dtype, self.post_op, [], "",
            )  # fmt: skip
        return made.clamp_(ending.low, ending.high) if ending.cuts and not ending.is_relu else made

    def _on_fbgemm(self, packed: Any, x: Tensor) -> Tensor:
        if self.ending.is_float:
            reals = as_quantized(x.contiguous(), 1.0, self.x_zero_point).dequantize()
            kernel_ = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
            return kernel_(reals, 1.0, self.x_zero_point, packed)  # type: ignore[no-any-return]
        run = torch.ops.quantized.linear_relu if self.ending.is_relu else torch.ops.quantized.linear
        return as_bytes(run(as_quantized(x.contiguous(), 1.0, self.x_zero_point), packed, 1.0, self.ending.zero_point))


@kernel("x86", "linear")
def linear(call: Call) -> Kernel:
    x = call.node.args[0]
    kind = x.meta.get("val") if isinstance(x, fx.Node) else None
    if kind is None or kind.dtype is not torch.uint8:
        raise NoKernelError("the kernels multiply uint8")
    if call.tensor("w").dtype is not torch.int8 or call["w_zero_point"] is not None:
        raise NoKernelError("the kernels take symmetric int8 weights")
    if call["dtype"] is torch.int8:
        raise NoKernelError("the kernels yield uint8 or float32")
    return Linear(call, Ending.of(call))
