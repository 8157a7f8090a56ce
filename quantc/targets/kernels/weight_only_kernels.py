"""Weight-only linear layers, and quantized weights of other ops, on kernels of torch.

`native_linear` has quantc's own kernels; times decide. On x86 fbgemm's float16 kernel takes what float16 represents exactly. torch wraps it twice: once
with little overhead, for one thread, and once for several. Where it is slower or not exact (24-bit scales per group),
the weight is dequantized once: speed and memory of the float model.

torch's own weight-only kernels are not used. On a CPU with AVX2 only, `_weight_int8pack_mm` is 4 to 38 times slower
than float, and `_weight_int4pack_mm_for_cpu` 9 to 74 times. With bfloat16 activations the first is as fast as float16
on one row and half as fast on many, but it rounds its input to 8 bits. `benchmarks/weight_only.py` measures them.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantc.errors import DataError
from quantc.integer.ops.weight_only import product
from quantc.targets.kernels import packing
from quantc.targets.kernels.fp16_weights import Halves, are_exact, exact_halves
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.stored_weight import StoredWeight, WeightOnly

MIN_OUTPUTS = 128
"""With fewer, fbgemm's kernel falls behind float on many rows."""
SMALL = 1 << 19
"""Weights of up to so many elements are faster in float on several threads: the other wrapper takes 20 µs a call."""


class HalfLinear(WeightOnly):
    """GEMM by float16 weights, then scale and bias per output."""

    name: ClassVar[str] = "fbgemm linear, exact float16 weights"
    family: ClassVar[str] = "fbgemm"

    def pack(self) -> Any:
        halves = exact_halves(self.stored)
        if halves is None:
            raise DataError(
                "a weight is not exact in float16",
                where="a state dict with other scales than those it was lowered with",
                advice="lower the program that has these weights",
            )
        bias = self.optional_buffer("bias")
        inside, after = (bias, None) if halves.factor is None else (None, bias)
        return self.packed(halves, inside), inside, halves.factor, after

    def packed(self, halves: Halves, bias: Tensor | None) -> Any:
        return packing.packed_halves(halves.matrix)

    def multiply(self, x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        return packing.multiply_halves(x, matrix, bias)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        matrix, inside, factor, after = packed
        x = inputs[0]
        y = self.multiply(x if x.dim() > 1 else x.unsqueeze(0), matrix, inside)
        if factor is not None:
            y = _brought(y, factor, after)
        return y if x.dim() > 1 else y.squeeze(0)


def _brought(y: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs brought to their scales, in the memory they are in."""
    if bias is None:
        return y.mul_(factor)
    return torch.addcmul(bias, y, factor, out=None if y.requires_grad else y)


class HalfLinearThreads(HalfLinear):
    """`HalfLinear` on several threads."""

    name: ClassVar[str] = "fbgemm linear, exact float16 weights, several threads"

    def packed(self, halves: Halves, bias: Tensor | None) -> Any:
        return packing.packed_halves_for_threads(halves.matrix, bias)

    def multiply(self, x: Tensor, matrix: Any, bias: Tensor | None) -> Tensor:
        return packing.multiply_halves_on_threads(x, matrix)


class FloatLinear(WeightOnly):
    """Linear op of the Q/DQ form, on a weight dequantized once."""

    name: ClassVar[str] = "float linear, float32 weights made once"
    family: ClassVar[str] = "float32"

    def pack(self) -> Any:
        weight = self.stored
        return weight.real(), self.optional_buffer("bias"), weight.transposed

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return product(inputs[0], *packed)


class FloatWeight(WeightOnly):
    """A weight dequantized once, for an op without a weight-only kernel."""

    name: ClassVar[str] = "float32 weight made once"

    def pack(self) -> Any:
        return self.stored.real()

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return packed


# -- which is taken ------------------------------------------------------------------------------------------------------


@kernel("x86", "linear_weight_only")
def half_linear(call: Call) -> Kernel:
    weight, has_threads = StoredWeight.of(call), torch.get_num_threads() > 1
    if not packing.has_halves():
        raise NoKernelError("this build of torch has no fbgemm")
    if weight.outputs < MIN_OUTPUTS:
        raise NoKernelError(f"with less than {MIN_OUTPUTS} outputs float is faster")
    if has_threads and weight.w.numel() <= SMALL:
        raise NoKernelError(f"on {torch.get_num_threads()} threads float is faster with so few weights")
    if not weight.inputs or not are_exact(weight):
        raise NoKernelError("its weights are not exact in float16")
    return (HalfLinearThreads if has_threads else HalfLinear)(weight, call["bias"])


def float_linear(call: Call) -> Kernel:
    return FloatLinear(StoredWeight.of(call), call["bias"])


def float_weight(call: Call) -> Kernel:
    return FloatWeight(StoredWeight.of(call))


for target in ("x86", "qnnpack"):
    kernel(target, "linear_weight_only")(float_linear)
    kernel(target, "stored_weight")(float_weight)
