"""What is done to bytes between products: pools, sums and products of elements, quantizing and bringing back."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.dialect import argument
from quantc.kernels.ending import Ending
from quantc.kernels.engines import as_bytes, as_quantized, hush, to_bytes
from quantc.kernels.packed import Kernel
from quantc.kernels.table import Call, NoKernelError, Placement, kernel

BYTES = (torch.uint8, torch.int8)


class MaxPool(Kernel):
    """The largest of each window. torch's pool of plain bytes refuses images that lie channels last."""

    name: ClassVar[str] = "quantized max_pool2d"
    any_order: ClassVar[bool] = True

    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.window = window

    def pack(self) -> Any:
        return self.window

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        images = as_quantized(x if x.dim() == 4 else x.unsqueeze(0))
        made = as_bytes(torch.ops.quantized.max_pool2d(images, *packed))
        made = made if x.dim() == 4 else made.squeeze(0)
        return made.contiguous() if self.in_order else made


@kernel("x86", "max_pool2d")
def max_pool(call: Call) -> Kernel:
    if _dtype(call.node.args[0]) is not torch.uint8:
        raise NoKernelError("the kernel is for uint8")
    size, stride, padding, dilation, ceil = (
        argument(call.node, name) for name in ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    )
    both = [list(item) * (2 // len(item)) if isinstance(item, list | tuple) else [item] * 2 for item in (
        size, stride or size, padding, dilation
    )]  # fmt: skip
    return MaxPool(*both, ceil)


class MaxPool3d(Kernel):
    """The largest of each window in space. torch's pool of plain bytes refuses those that lie channels last."""

    name: ClassVar[str] = "max_pool3d"
    any_order: ClassVar[bool] = True

    def __init__(self, *window: Any) -> None:
        super().__init__()
        self.window = window

    def pack(self) -> Any:
        return self.window

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return torch.max_pool3d(inputs[0].contiguous(), *packed)


@kernel("x86", "max_pool3d")
def max_pool_3d(call: Call) -> Kernel:
    if _dtype(call.node.args[0]) not in BYTES:
        raise NoKernelError("the kernel is for bytes")
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    size, stride, *rest = (argument(call.node, name) for name in names)
    return MaxPool3d(size, stride or size, *rest)


class Sum(Kernel):
    """Two tensors of bytes added, each on its own scale, and rounded onto the grid of the sum."""

    name: ClassVar[str] = "quantized add"
    any_order: ClassVar[bool] = True

    def __init__(self, scales: tuple[float, float], zero_points: tuple[int, int], ending: Ending) -> None:
        super().__init__()
        self.scales, self.zero_points, self.ending = scales, zero_points, ending

    def pack(self) -> Any:
        return torch.ops.quantized.add_relu if self.ending.is_relu else torch.ops.quantized.add

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        ending = self.ending
        terms = (
            as_quantized(x, scale, zero) for x, scale, zero in zip(inputs, self.scales, self.zero_points, strict=True)
        )
        made = as_bytes(packed(*terms, 1.0, ending.zero_point))
        if ending.cuts and not ending.is_relu:
            made.clamp_(ending.low, ending.high)
        return made.contiguous() if self.in_order else made


@kernel("x86", "sum")
def add(call: Call) -> Placement:
    terms: Any = call.node.args[0]
    nodes: Any = call.node.args[2]
    factors = [call.program.tensor(node) for node in nodes]
    if len(terms) != 2 or call["offset"] is not None:
        raise NoKernelError("it is not the sum of two tensors")
    if any(_dtype(term) is not torch.uint8 for term in terms) or call["dtype"] is not torch.uint8:
        raise NoKernelError("the kernel adds uint8")
    if any(factor is None or factor.numel() != 1 or float(factor) <= 0 for factor in factors):
        raise NoKernelError("a summand is subtracted, or has a scale for each channel")
    shapes = {term.meta["val"].shape for term in terms}
    if len(shapes) != 1:
        raise NoKernelError("a summand is broadcast")
    first, second = (float(factor) for factor in factors if factor is not None)
    return Placement(Sum((first, second), tuple(call["zero_points"]), Ending.of(call, torch.ones(()))), tuple(terms))


def _dtype(node: Any) -> torch.dtype | None:
    kind = node.meta.get("val") if isinstance(node, fx.Node) else None
    return getattr(kind, "dtype", None)


# -- where bytes begin and end -------------------------------------------------------------------------------------


class Quantize(Kernel):
    """A float tensor rounded to bytes, in one go."""

    name: ClassVar[str] = "fbgemm quantize"
    any_order: ClassVar[bool] = True

    def __init__(self, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.grid = (scale, zero_point, dtype)
        limits = torch.iinfo(dtype)
        self.bounds = None if (low, high) == (limits.min, limits.max) else (low, high)

    def pack(self) -> Any:
        hush()
        return self.grid

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        made = to_bytes(inputs[0], *packed)
        if self.bounds is not None:
            made.clamp_(*self.bounds)
        return made.contiguous() if self.in_order else made


class Dequantize(Kernel):
    """Bytes as the real numbers they stand for."""

    name: ClassVar[str] = "fbgemm dequantize"
    any_order: ClassVar[bool] = True

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        self.grid = (scale, zero_point)

    def pack(self) -> Any:
        return self.grid

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        made = as_quantized(inputs[0], *packed).dequantize()
        return made.contiguous() if self.in_order else made


@kernel("x86", "quantized_decomposed.quantize_per_tensor.default")
def quantize(call: Call) -> Kernel:
    _, scale, zero_point, low, high, dtype = call.node.args
    if dtype not in BYTES or _dtype(call.node.args[0]) is not torch.float32:
        raise NoKernelError("the kernel makes bytes of float32")
    return Quantize(scale, zero_point, low, high, dtype)  # type: ignore[arg-type]


@kernel("x86", "quantized_decomposed.dequantize_per_tensor.default")
def dequantize(call: Call) -> Kernel:
    if _dtype(call.node.args[0]) not in BYTES or call.node.kwargs.get("out_dtype"):
        raise NoKernelError("the kernel makes float32 of bytes")
    return Dequantize(call.node.args[1], call.node.args[2])  # type: ignore[arg-type]
