"""Int8 linear layers on QNNPACK."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from quantc.targets.kernels.kernel import Kernel, Work, check_columns
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.qnnpack_layer import QnnpackLayer, QnnpackProduct


class QnnpackLinear(QnnpackProduct):
    """Linear layer: GEMM along the last axis."""

    name: ClassVar[str] = "QNNPACK linear"

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        check_columns(x, self.sizes[0], self.name)
        x = self.unsigned(x).contiguous()
        if x.dim() > 1:
            return self.multiplied(packed, x)
        return self.multiplied(packed, x.unsqueeze(0)).squeeze(0)

    def work(self, *inputs: Tensor) -> Work:
        x = inputs[0]
        return Work("linear", x.numel() // max(x.shape[-1], 1), self.sizes)


@kernel("qnnpack", "linear")
def linear(call: Call) -> Kernel:
    return QnnpackLinear(QnnpackLayer.of(call, "linear", call.tensor("w"), call["w_zero_point"]))


@kernel("qnnpack", "matmul")
def matmul(call: Call) -> Kernel:
    """Matmul by a constant matrix, as a linear layer with the transposed weight."""
    matrix = call.tensor("y")
    if matrix.dim() != 2:
        raise NoKernelError("QNNPACK multiplies with one matrix")
    return QnnpackLinear(QnnpackLayer.of(call, "linear", matrix.t().contiguous(), call["y_zero_point"]))
