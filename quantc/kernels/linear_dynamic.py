"""Linear layers with run-time scales: fbgemm's kernel on x86, QNNPACK's elsewhere."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.kernels.engines import packed_linear
from quantc.kernels.packed import Kernel
from quantc.kernels.table import Call, NoKernelError, kernel

REDUCED, FULL = 127, 255
"""The largest level of an activation, where sums of two products must fit 16 bits and where they need not."""


class LinearDynamic(Kernel):
    """Quantizes its input with one scale, multiplies, and brings the sums back to float."""

    name: ClassVar[str] = "linear_dynamic"

    def __init__(self, engine: str, weight: Tensor, scale: Tensor, bias: Tensor | None, reduced: bool) -> None:
        super().__init__()
        self.engine = engine
        self.reduced = reduced
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def pack(self) -> Any:
        return packed_linear(self.engine, self.get_buffer("weight"), self.get_buffer("scale"), self.bias)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return torch.ops.quantized.linear_dynamic(inputs[0], packed, self.reduced)


def _make(engine: str, call: Call) -> Kernel:
    if call["per_token"] or call["x_zero_point"] is not None:
        raise NoKernelError("its scales are not those of a whole affine tensor")
    if call["dtype"] is not torch.uint8 or call["qmin"] != 0 or call["qmax"] not in (REDUCED, FULL):
        raise NoKernelError(f"the kernel quantizes to 0..127 or 0..255, not to {call['qmin']}..{call['qmax']}")
    if call["w_zero_point"] is not None:
        raise NoKernelError("its weights are not symmetric")
    bias = call["bias"]
    if bias is not None and not isinstance(bias, Tensor):
        raise NoKernelError("its bias is not a constant")
    return LinearDynamic(engine, call.tensor("w"), call.tensor("w_scale"), bias, call["qmax"] == REDUCED)


@kernel("x86", "linear_dynamic")
def fbgemm(call: Call) -> Kernel:
    return _make("fbgemm", call)


@kernel("qnnpack", "linear_dynamic")
def qnnpack(call: Call) -> Kernel:
    return _make("qnnpack", call)
