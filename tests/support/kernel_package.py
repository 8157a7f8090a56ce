"""A chip's kernels as a package from outside: one for linear layers, by NumPy. It is copied to a folder and found there."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

import quantc as qc
from quantc.patterns import Rule, RuleTable, aten, const, optional
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.lowered import lower
from quantc.targets.target import Target
from quantc.targets.target_table import kernel_pipeline


@kernel("toychip", "linear")
class NumpyLinear(Kernel):
    """Sums in int64, rounded half to even."""

    name: ClassVar[str] = "numpy linear"
    family: ClassVar[str] = "toychip"

    def __init__(self, call: Call) -> None:
        super().__init__()
        if call["dtype"] != torch.int8 or call["w_zero_point"] is not None:
            raise NoKernelError("it takes int8 with symmetric weights")
        self.zero_point: int = call["x_zero_point"]
        self.ends: tuple[int, int, int] = (call["out_zero_point"], call["qmin"], call["qmax"])
        self.register_buffer("w", call.tensor("w"))
        self.register_buffer("multiplier", call.tensor("multiplier"))
        self.register_buffer("bias", None if call["bias"] is None else call.tensor("bias"))

    def pack(self) -> Any:
        w, bias, multiplier = (self._buffers[name] for name in ("w", "bias", "multiplier"))
        assert w is not None
        assert multiplier is not None
        return w.numpy().astype(np.int64).T, 0 if bias is None else bias.numpy().astype(np.int64), multiplier.numpy()

    def run(self, packed: Any, *inputs: Tensor) -> Tensor:
        w, bias, multiplier = packed
        zero, low, high = self.ends
        acc = (inputs[0].numpy().astype(np.int64) - self.zero_point) @ w + bias
        return torch.from_numpy(np.clip(np.rint(acc * multiplier) + zero, low, high).astype(np.int8))


LINEAR = aten.linear("x", const("w"), const("b?")) >> optional(aten.relu)
ROLES = {"x": "act", "w": "weight", "b": "bias", "out": "act"}
BACKEND = qc.Backend(
    "toychip",
    RuleTable("toychip", (Rule("linear", LINEAR, ROLES, supports={"qdq", "integer"}),)),
    roles={"act": qc.INT8, "weight": qc.INT8_WEIGHT, "bias": qc.INT32_BIAS},
)


def run_there(program: qc.Program, **options: Any) -> qc.Lowered:
    return lower(program, "toychip", **options)


TARGET = Target("toychip", run_there, in_process=True, pipeline=kernel_pipeline("toychip"))
