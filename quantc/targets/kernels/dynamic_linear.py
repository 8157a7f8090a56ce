"""Dynamically quantized linear layers: fbgemm's kernel on x86, QNNPACK's elsewhere.

fbgemm's kernel gets the qparams of the integer form. Both kernels could choose their own, but NaN inputs make them fail
or yield garbage, and they never choose a scale below 2^-14.

Differences from the integer form: fbgemm adds the zero point before it rounds, so a value halfway between two levels
may round to the other one; and the bias is added in float32, not in steps of the accumulator.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.targets.kernels.dynamic_quantization import HIGHEST_LEVEL, RunTimeGrid
from quantc.targets.kernels.kernel import Kernel, Work, check_columns
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.packing import packed_linear, unpacked_linear

LINEAR: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
LINEAR_RELU: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32.default
QNNPACK_LINEAR: Any = torch.ops.quantized.linear_dynamic.default
QNNPACK_LINEAR_RELU: Any = torch.ops.quantized.linear_relu_dynamic.default
ON_OWN_SCALE: Any = QNNPACK_LINEAR._op
ON_OWN_SCALE_RELU: Any = QNNPACK_LINEAR_RELU._op
"""Those ops themselves: a small layer takes so little time that what torch puts around ops is felt."""
SMALLEST_SCALE = 2.0**-14
"""Of the kernels that choose scales on their own."""


@dataclass(frozen=True)
class Weight:
    """Linear weight as the kernels take it: symmetric int8, one row per output."""

    levels: Tensor
    scale: Tensor
    """One for all, or one for each row."""
    bias: Tensor | None

    @staticmethod
    def of(call: Call, name: str) -> Weight:
        """The weight of a call: `w` has outputs in rows, `y` in columns."""
        levels, bias = call.tensor(name), call["bias"]
        if call[f"{name}_zero_point"] is not None:
            raise NoKernelError("its weights are not symmetric")
        if bias is not None and not isinstance(bias, Tensor):
            raise NoKernelError("its bias is not a constant")
        if call["alpha"] not in (None, 1.0):
            raise NoKernelError(f"its product is taken times {call['alpha']}")
        if levels.dtype is not torch.int8 or levels.dim() != 2:
            raise NoKernelError(f"the kernel takes matrices of int8, not {levels.dtype} of {levels.dim()} axes")
        if not levels.numel():
            raise NoKernelError("its weight is empty")
        rows = levels if name == "w" else levels.t().contiguous()
        if bias is not None and bias.shape != rows.shape[:1]:
            raise NoKernelError("its bias is not one number for each output")
        return Weight(rows, call.tensor(f"{name}_scale"), None if bias is None else bias.float())

    @staticmethod
    def stacked(weights: Sequence[Weight]) -> Weight:
        """Weights of sibling layers with a shared input, concatenated along the outputs."""
        sizes = [weight.levels.shape[0] for weight in weights]
        biases = [torch.zeros(size) if w.bias is None else w.bias for w, size in zip(weights, sizes, strict=True)]
        return Weight(
            torch.cat([weight.levels for weight in weights]),
            torch.cat([weight.scale.expand(size) for weight, size in zip(weights, sizes, strict=True)]),
            None if all(weight.bias is None for weight in weights) else torch.cat(biases),
        )


class LinearDynamic(Kernel):
    """Dynamically quantized layers with weights as buffers."""

    def __init__(self, weight: Weight, grid: RunTimeGrid) -> None:
        super().__init__()
        self.grid = grid
        self.shape = weight.levels.shape
        """Outputs and inputs."""
        self.outputs: list[int] = []
        """Number of columns of each layer's result, where this kernel runs several layers."""
        self.relu = False
        self.register_buffer("weight", weight.levels)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("bias", weight.bias)

    @property
    def plain(self) -> Weight:
        return Weight(self.get_buffer("weight"), self.get_buffer("scale"), self.optional_buffer("bias"))

    @property
    def joins(self) -> Hashable:
        return self.grid, self.relu

    @classmethod
    def joined(cls, kernels: Sequence[Kernel]) -> Kernel:
        layers = [layer for layer in kernels if isinstance(layer, LinearDynamic)]
        one = cls(Weight.stacked([layer.plain for layer in layers]), layers[0].grid)
        one.outputs = [layer.shape[0] for layer in layers]
        one.relu = layers[0].relu
        one.in_order = any(layer.in_order for layer in layers)
        return one

    def work(self, *inputs: Tensor) -> Work:
        rows, columns = self.shape
        return Work("linear_dynamic", inputs[0].numel() // max(columns, 1), (columns, rows))

    def absorb(self, op: str) -> bool:
        if op != "relu":
            return False
        self.relu = True
        return True

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        rows, columns = self.shape
        check_columns(x, columns, self.name)
        if x.dtype is not torch.float32:
            x = x.to(torch.float32)
        if not x.numel():
            result = x.new_empty([*x.shape[:-1], rows])
        elif x.dim() > 1:
            result = self.product(packed, x)
        else:
            result = self.product(packed, x.unsqueeze(0)).squeeze(0)
        if not self.outputs:
            return result
        parts = torch.split(result, self.outputs, dim=-1)
        return tuple(part.contiguous() for part in parts) if self.in_order else parts

    @abstractmethod
    def product(self, packed: Any, x: Tensor) -> Tensor:
        """GEMM of a non-empty float32 tensor that has rows; results of sibling layers are concatenated."""

    def nothing(self, x: Tensor) -> Tensor:
        """Result for a non-finite input: NaN."""
        return x.new_full([*x.shape[:-1], self.shape[0]], torch.nan)

    def extra_repr(self) -> str:
        return f"{self.name}{', relu' if self.relu else ''}"


class OfWhole(LinearDynamic):
    """Per-tensor dynamic quantization on fbgemm."""

    name: ClassVar[str] = "fbgemm linear"
    family: ClassVar[str] = "fbgemm"

    def pack(self) -> Any:
        return packed_linear("fbgemm", *_parts(self.plain))

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": unpacked_linear(packed)}

    def product(self, packed: Any, x: Tensor) -> Tensor:
        found = self.grid.of_whole(x)
        if found is None:
            return self.nothing(x)
        result: Tensor = (LINEAR_RELU if self.relu else LINEAR)(x, *found, packed)
        return result

    @property
    def pair_sums(self) -> tuple[Tensor, int] | None:
        return self.plain.levels, self.grid.span


class OnOwnScale(OfWhole):
    """Per-tensor dynamic quantization with the scale that fbgemm's kernel finds itself: torch's, which differs from the
    integer form's near the smallest scale. Registered for no op: modules that keep torch's scales use it.

    The kernel hides non-finite inputs, so they are checked for; values whose square overflows count as non-finite.
    """

    name: ClassVar[str] = "fbgemm linear, on a scale of its own"

    def forward(self, *inputs: Tensor) -> Any:
        """Direct call of the packed kernel where the input allows it."""
        x, packed = inputs[0], self._packed
        if packed is None or x.dim() < 2 or x.dtype is not torch.float32 or x.size(-1) != self.shape[1]:
            return super().forward(*inputs)
        return self.product(packed, x) if x.numel() else super().forward(*inputs)

    def product(self, packed: Any, x: Tensor) -> Tensor:
        if not math.isfinite(torch.linalg.vector_norm(x).item()):
            return super().product(packed, x)
        made: Tensor = (ON_OWN_SCALE_RELU if self.relu else ON_OWN_SCALE)(x, packed, self.grid.span < HIGHEST_LEVEL)
        return made


class OfRows(OfWhole):
    """Per-row (per-token) dynamic quantization.

    fbgemm supports a single scale. So rows are divided by their scales first, the kernel multiplies with scale 1, and
    its sums are corrected by the zero points, weighted with the row sums of the weight, and by the scales.
    """

    name: ClassVar[str] = "fbgemm linear, by rows"

    def pack(self) -> Any:
        levels, scale, bias = _parts(self.plain)
        sums = (levels.sum(dim=1, dtype=torch.float64) * scale.double()).float()
        return packed_linear("fbgemm", levels, scale, None), sums, bias

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return super().unpack(packed[0])

    def product(self, packed: Any, x: Tensor) -> Tensor:
        weight, sums, bias = packed
        columns = x.shape[-1]
        if x.numel() == columns and self.grid.middle is None:
            return self._of_one(weight, bias, x)
        rows = self.grid.of_rows(x.reshape(-1, columns))
        result: Tensor = LINEAR(rows.steps, 1.0, self.grid.middle or 0, weight)
        if rows.lowest is not None:
            result.addcmul_(rows.lowest, sums)
        result = result.mul_(rows.scale) if bias is None else torch.addcmul(bias, result, rows.scale)
        if self.relu:
            result.relu_()
        return result.reshape([*x.shape[:-1], -1])

    def _of_one(self, weight: Any, bias: Tensor | None, x: Tensor) -> Tensor:
        """A single row is a whole; one that is symmetric always ends halfway between two levels, and is cut off there."""
        found = self.grid.of_whole(x)
        if found is None:
            return self.nothing(x)
        result: Tensor = LINEAR(x, *found, weight)
        if bias is not None:
            result.add_(bias)
        return result.relu_() if self.relu else result


class OfWholeOnQnnpack(LinearDynamic):
    """Per-tensor dynamic quantization; QNNPACK's kernel finds the scale itself, and it is the same."""

    name: ClassVar[str] = "QNNPACK linear"
    family: ClassVar[str] = "qnnpack"

    def pack(self) -> Any:
        return packed_linear("qnnpack", *_parts(self.plain))

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        return {"weight": unpacked_linear(packed)}

    def product(self, packed: Any, x: Tensor) -> Tensor:
        if self.grid.of_whole(x) is None:
            return self.nothing(x)
        result: Tensor = (QNNPACK_LINEAR_RELU if self.relu else QNNPACK_LINEAR)(x, packed, False)
        return result


def _parts(weight: Weight) -> tuple[Tensor, Tensor, Tensor | None]:
    return weight.levels, weight.scale, weight.bias


WEIGHTS = {"linear_dynamic": "w", "matmul_dynamic": "y"}
"""The name of the constant operand, by op."""


@kernel("x86", *WEIGHTS)
def fbgemm(call: Call) -> Kernel:
    return (OfRows if call["per_token"] else OfWhole)(Weight.of(call, WEIGHTS[call.op]), RunTimeGrid.of(call))


@kernel("qnnpack", *WEIGHTS)
def qnnpack(call: Call) -> Kernel:
    grid = RunTimeGrid.of(call)
    if call["per_token"] or grid.middle is not None:
        raise NoKernelError("the kernel finds one affine scale for all that it reads")
    if grid.span != HIGHEST_LEVEL:
        raise NoKernelError(f"the kernel quantizes to 0..{HIGHEST_LEVEL}, not to {call['qmin']}..{call['qmax']}")
    if grid.eps < SMALLEST_SCALE:
        raise NoKernelError(f"the kernel has no smaller scale than 2^-14, and {grid.eps:.3g} is asked for")
    return OfWholeOnQnnpack(Weight.of(call, WEIGHTS[call.op]), grid)
