"""8-bit norms and softmax, computed in float32 and rounded once.

torch's norms of quantized tensors are not used: they compute the variance as the difference of two large float32
numbers, which cancels in nearly constant rows; and they are no faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from quantc.integer.ops.integer_norms import reciprocal_places
from quantc.ir.types import tensor_type
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_elementwise import EXACT_STEPS, FURTHEST_LEVEL, Rounding, check_bytes, real
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel

LAST_PLACE = 2.0**-23
"""Spacing of float32 numbers just above 1."""


@dataclass(frozen=True)
class NormKernelRows:
    """Elements normalized together: the trailing axes, or groups of channels with all their elements."""

    shape: tuple[int, ...] = ()
    """The last axes; none if it is groups of channels."""
    groups: int = 0
    channels: int = 0


class Normalize(Rounding):
    """Layer, group or instance norm, computed on levels; eps is rescaled to levels as well."""

    name: ClassVar[str] = "float32 norm"

    def __init__(self, rows: NormKernelRows, eps: float, factor: Tensor, offset: Tensor | None, ending: Ending) -> None:
        super().__init__(ending)
        self.rows, self.eps = rows, eps
        # torch takes one number per element of a row, or per channel
        self.register_buffer("factor", self._spread(factor))
        self.register_buffer("offset", None if offset is None else self._spread(offset))

    def _spread(self, values: Tensor) -> Tensor:
        if self.rows.shape:
            return (values if values.numel() > 1 else values.reshape(())).float().expand(self.rows.shape).contiguous()
        return values.float().reshape(-1).expand(self.rows.channels).contiguous()

    def pack(self) -> Any:
        super().pack()
        return self.get_buffer("factor"), self.optional_buffer("offset")

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        rows, (factor, offset) = self.rows, packed
        levels = inputs[0].float()  # a zero point would go with the mean
        if rows.shape:
            return self.settled(functional.layer_norm(levels, rows.shape, factor, offset, self.eps))
        # for channels-last inputs torch too computes the variance as a difference of two large numbers
        in_order = levels.contiguous(memory_format=torch.contiguous_format)
        return self.settled(functional.group_norm(in_order, rows.groups, factor, offset, self.eps))


class RootMeanSquare(Normalize):
    """RMS norm: does not subtract the mean."""

    name: ClassVar[str] = "float32 rms_norm"

    def __init__(self, zero_point: int, *rest: Any) -> None:
        super().__init__(*rest)
        self.zero_point = zero_point

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        factor, offset = packed
        made = functional.rms_norm(real(inputs[0], 1.0, self.zero_point), self.rows.shape, factor, self.eps)
        return self.settled(made if offset is None else made.add_(offset))


@kernel("x86", "normalize")
def normalize(call: Call) -> Kernel:
    check_bytes(call.node.args[0])
    length: int = call["length"]
    multiplier, offset = call.tensor("multiplier"), call["offset"]
    ending = Ending.of(call, torch.ones(()))
    rows = _rows(call, length, multiplier, offset)
    factor = multiplier.double() * 2.0 ** reciprocal_places(length)
    eps = call["eps"] * 2.0 ** -call["places"] / length**2
    steepest = float(factor.abs().max()) / math.sqrt(eps) if eps else math.inf
    largest = float(factor.abs().max()) * math.sqrt(length) + (0.0 if offset is None else float(offset.abs().max()))
    if steepest * FURTHEST_LEVEL * LAST_PLACE > 0.25 or largest > EXACT_STEPS:
        raise NoKernelError("float32 has too few places for rows whose elements are nearly alike")
    numbers = (rows, eps, factor, offset, ending)
    if call["centre"]:
        return Normalize(*numbers)
    if not rows.shape:
        raise NoKernelError("groups of channels have no norm without a mean")
    return RootMeanSquare(call["x_zero_point"], *numbers)


def _rows(call: Call, length: int, *numbers: Tensor | None) -> NormKernelRows:
    """Axes that `length` elements come from, such that the affine parameters broadcast to them."""
    kind = tensor_type(call.node.args[0])
    given = [values for values in numbers if values is not None]
    shape = () if kind is None else kind.shape
    for first in range(len(shape)):
        last = shape[first:]
        sizes = [size for size in last if isinstance(size, int)]
        if len(sizes) == len(last) and math.prod(sizes) == length and all(_go_with(values, sizes) for values in given):
            return NormKernelRows(tuple(sizes))
    inner = [size for size in shape[1:] if isinstance(size, int)]
    if len(shape) < 3 or len(inner) < len(shape) - 1 or math.prod(inner) % length:
        raise NoKernelError("what it normalizes together is neither whole axes nor groups of channels")
    groups, channels = math.prod(inner) // length, inner[0]
    if channels % groups or any(values.numel() not in (1, channels) for values in given):
        raise NoKernelError("its numbers are not those of channels")
    return NormKernelRows(groups=groups, channels=channels)


def _go_with(values: Tensor, sizes: list[int]) -> bool:
    """True if parameters broadcast to a row."""
    if values.numel() == 1:
        return True
    own = sizes[len(sizes) - values.dim() :] if values.dim() <= len(sizes) else []
    return len(own) == values.dim() and all(size in (1, axis) for size, axis in zip(values.shape, own, strict=True))


class Softmax(Rounding):
    """Softmax in float32."""

    name: ClassVar[str] = "float32 softmax"

    def __init__(self, scale: float, dim: int, step: float, ending: Ending) -> None:
        super().__init__(ending)
        self.scale, self.dim, self.step = scale, dim, step

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return self.settled(torch.softmax(real(inputs[0], self.scale, 0), self.dim), self.step)


MAX_SCALE = 50.0
"""Above it the second largest element comes to nothing beside the largest, and so does its entry in the table."""


@kernel("x86", "softmax")
def softmax(call: Call) -> Kernel:
    check_bytes(call.node.args[0])
    one, next_to_it = (float(entry) for entry in call.tensor("table")[:2])
    scale = min(-math.log(next_to_it / one), MAX_SCALE) if next_to_it else MAX_SCALE
    shift = call["shift"]
    steps = float(call.tensor("multiplier")) * (1.0 if shift is None else 2.0 ** -float(shift))
    dtype = call["dtype"]
    if dtype not in (torch.uint8, torch.int8):
        raise NoKernelError(f"kernels yield bytes, not {dtype}")
    ending = Ending(torch.ones(1), call["out_zero_point"], call["qmin"], call["qmax"], dtype)
    return Softmax(scale, call["dim"], 1.0 / steps, ending)
