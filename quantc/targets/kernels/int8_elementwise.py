"""8-bit elementwise kernels (add, mul, requantize) and the quantize/dequantize boundary.

Values are computed in float32, in steps of the result, and rounded once. 8-bit levels are exact in float32, and an
unclamped result has at most 256 levels: so float32 error moves only a few results that lie halfway between two levels,
and none by more than one level. Only sums with cancelling terms could lose more; they are refused where they could.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from quantc.ir.types import TensorType, dtype_of, tensor_type
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.kernel_table import Call, NoKernelError, Placement, kernel
from quantc.targets.kernels.packing import BYTEWISE, as_quantized, to_bytes

BYTES = (torch.uint8, torch.int8)
FURTHEST_LEVEL = 255
"""The most that a byte can be away from a zero point."""
EXACT_STEPS = 2**20
"""Up to so many steps float32 has places enough behind the point."""


class Rounding(Kernel):
    """Base of kernels that compute steps of the result in float32 and round once. They accept any memory format."""

    any_order: ClassVar[bool] = True

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self.ending = ending

    def pack(self) -> Any:
        return ()

    def settled(self, values: Tensor, scale: float = 1.0) -> Tensor:
        """Values quantized with `scale` onto the result's grid; unchanged if the result is float."""
        ending = self.ending
        made = values if ending.is_float else to_bytes(values, scale, ending.zero_point, ending.dtype)
        if ending.cuts:
            made.clamp_(ending.low, ending.high)
        return made.contiguous() if self.in_order else made


def check_bytes(*nodes: Any) -> None:
    if any(dtype_of(node) not in BYTES for node in nodes):
        raise NoKernelError("the kernel is for bytes")


def one_number(call: Call, value: Any) -> float:
    """A per-tensor multiplier; NoKernelError if it is per channel."""
    tensor = call.program.tensor(value) if isinstance(value, fx.Node) else value
    if not isinstance(tensor, Tensor) or tensor.numel() != 1:
        raise NoKernelError("it has a multiplier for each channel")
    return float(tensor)


def real(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Dequantized float32 tensor: new memory that may be overwritten, with the strides of the input.

    torch's dequantize keeps channels-last strides and makes all others contiguous, though every float op keeps them:
    results would have other strides than the model's.
    """
    if x.is_contiguous() or _is_channels_last(x):
        return as_quantized(x, scale, zero_point).dequantize()
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    made = as_quantized(x.permute(order), scale, zero_point).dequantize()
    return made.permute(sorted(range(x.dim()), key=order.__getitem__))


def _is_channels_last(x: Tensor) -> bool:
    form = _CHANNELS_LAST.get(x.dim())
    return form is not None and x.is_contiguous(memory_format=form)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


# -- two tensors of one shape ----------------------------------------------------------------------------------------


class Bytewise(Rounding):
    """Elementwise op on two 8-bit tensors of one shape, each with its own scale, in one op."""

    def __init__(self, op: str, scales: tuple[float, float], zero_points: tuple[int, int], ending: Ending) -> None:
        super().__init__(ending)
        self.op = f"{op} relu" if ending.is_relu else op
        self.scales, self.zero_points = scales, zero_points

    def pack(self) -> Any:
        return (BYTEWISE[self.op], *self.scales, *self.zero_points)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        op, first_scale, second_scale, first_zero, second_zero = packed
        x, y = inputs
        ending = self.ending
        made = torch.empty_like(x)
        result = as_quantized(made, 1.0, ending.zero_point)
        op(as_quantized(x, first_scale, first_zero), as_quantized(y, second_scale, second_zero), result)
        if ending.cuts and not ending.is_relu:
            made.clamp_(ending.low, ending.high)
        return made.contiguous() if self.in_order else made


class Sum(Bytewise):
    name: ClassVar[str] = "quantized add"


class QuantizedMul(Bytewise):
    name: ClassVar[str] = "quantized mul"


def _check_alike(call: Call, terms: Sequence[Any]) -> None:
    kinds = {tensor_type(term) for term in terms}
    if len(terms) != 2 or len(kinds) != 1:
        raise NoKernelError("its operands are not two of one shape and dtype")
    check_bytes(*terms)
    if call["dtype"] is not dtype_of(terms[0]):
        raise NoKernelError("its result has another dtype than its operands")


def _terms(call: Call) -> tuple[list[Any], list[Any], list[int]]:
    """Of a sum: the tensors, their multipliers, their zero points."""
    xs, zero_points, multipliers = (list(item) for item in call.node.args[:3])  # type: ignore[arg-type]
    return xs, multipliers, zero_points


@kernel("x86", "sum")
def add(call: Call) -> Placement:
    terms, multipliers, zeros = _terms(call)
    _check_alike(call, terms)
    if call["offset"] is not None:
        raise NoKernelError("a number is added too")
    first, second = (one_number(call, item) for item in multipliers)
    _check_room([abs(first), abs(second)])
    ending = Ending.of(call, torch.ones(()))
    return Placement(Sum("add", (first, second), (zeros[0], zeros[1]), ending), tuple(terms))


@kernel("x86", "mul")
def multiply(call: Call) -> Placement:
    x, y = call.node.args[0], call.node.args[2]
    _check_alike(call, [x, y])
    ending = Ending.of(call)
    zeros = (call["x_zero_point"], call["y_zero_point"])
    made = QuantizedMul("mul", (one_number(call, call["multiplier"]), 1.0), zeros, ending)
    return Placement(made, (x, y))  # type: ignore[arg-type]


def _check_room(reaches: Sequence[float], offset: float = 0.0) -> None:
    """Refuse sums that are so much larger than their steps that terms which cancel could leave an error of one."""
    if sum(reaches) * FURTHEST_LEVEL + abs(offset) > EXACT_STEPS:
        raise NoKernelError("float32 has too few places for its sums")


# -- any others --------------------------------------------------------------------------------------------------------


class FloatSum(Rounding):
    """Sum of 8-bit tensors and a number; operands may be broadcast, have per-channel scales, or be missing."""

    name: ClassVar[str] = "float32 sum"

    def __init__(self, zeros: Sequence[int], multipliers: Sequence[Tensor], offset: Tensor | None, *rest: Any) -> None:
        ending, self.is_whole = rest
        super().__init__(ending)
        self.zeros = tuple(zeros)
        for index, multiplier in enumerate(multipliers):
            self.register_buffer(f"multiplier_{index}", multiplier.float())
        self.register_buffer("offset", None if offset is None else offset.float())

    def pack(self) -> Any:
        multipliers = [self.get_buffer(f"multiplier_{index}") for index in range(len(self.zeros))]
        # a single number is folded into the scale; others are multiplied
        terms = [(float(item), zero, None) if item.numel() == 1 else (1.0, zero, item) for item, zero in zip(
            multipliers, self.zeros, strict=True
        )]  # fmt: skip
        return terms, self.optional_buffer("offset")

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        terms, offset = packed
        total: Any = None
        for x, (scale, zero_point, multiplier) in zip(inputs, terms, strict=True):
            term = real(x, scale, zero_point)
            if multiplier is not None:
                term.mul_(multiplier)
            total = term if total is None else total.add_(term) if self.is_whole else total + term
        if offset is not None:
            total.add_(offset)
        return self.settled(total)


@kernel("x86", "sum")
def sum_in_float(call: Call) -> Placement:
    xs, nodes, zeros = _terms(call)
    check_bytes(*xs)
    factors = [call.program.tensor(node) for node in nodes]
    result = tensor_type(call.node)
    kinds = [tensor_type(x) for x in xs]
    multipliers = [factor for factor in factors if factor is not None]
    if len(multipliers) < len(xs) or result is None:
        raise NoKernelError("a multiplier is not a constant")
    # operands with the result's shape come first: the others are added in place
    order = sorted(range(len(xs)), key=lambda index: _shape(kinds[index]) != result.shape)
    if not all(_fits(multiplier, kind) for multiplier, kind in zip(multipliers, kinds, strict=True)):
        raise NoKernelError("a multiplier has more axes than its summand")
    offset = call["offset"]
    if offset is not None and not _fits(offset, result):
        raise NoKernelError("the number that is added has more axes than the sum")
    ending = Ending.of(call, torch.ones(()))
    if not ending.is_float:
        reaches = [float(multiplier.abs().max()) for multiplier in multipliers]
        _check_room(reaches, 0.0 if offset is None else float(offset.abs().max()))
    chosen = [xs[index] for index in order]
    parts = ([zeros[index] for index in order], [multipliers[index] for index in order], offset)
    return Placement(FloatSum(*parts, ending, _shape(kinds[order[0]]) == result.shape), tuple(chosen))


def _shape(kind: TensorType | None) -> tuple[int | str, ...] | None:
    return None if kind is None else kind.shape


def _fits(values: Tensor, kind: TensorType | None) -> bool:
    """True if numbers can be multiplied into a tensor in place, without broadcasting it."""
    if kind is None or values.dim() > kind.rank:
        return values.numel() == 1
    own = kind.shape[kind.rank - values.dim() :]
    return all(size in (1, axis) for size, axis in zip(values.shape, own, strict=True))


class FloatProduct(Rounding):
    """Elementwise product of two 8-bit tensors, one of which may be broadcast."""

    name: ClassVar[str] = "float32 mul"

    def __init__(self, scale: float, zero_points: tuple[int, int], ending: Ending, is_whole: bool) -> None:
        super().__init__(ending)
        self.scale, self.zero_points, self.is_whole = scale, zero_points, is_whole

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x, y = inputs
        first, second = self.zero_points
        left, right = real(x, self.scale, first), real(y, 1.0, second)
        return self.settled(left.mul_(right) if self.is_whole else left * right)


@kernel("x86", "mul")
def multiply_in_float(call: Call) -> Placement:
    factors: Any = [(call.node.args[0], call["x_zero_point"]), (call.node.args[2], call["y_zero_point"])]
    check_bytes(*(node for node, _ in factors))
    whole = _shape(tensor_type(call.node))
    factors.sort(key=lambda factor: _shape(tensor_type(factor[0])) != whole)
    (x, x_zero), (y, y_zero) = factors
    is_whole = _shape(tensor_type(x)) == whole
    scale = one_number(call, call["multiplier"])
    return Placement(FloatProduct(scale, (x_zero, y_zero), Ending.of(call), is_whole), (x, y))


class Requantize(Rounding):
    """Requantize through float32, which is several times as fast as a lookup table."""

    name: ClassVar[str] = "float32 requantize"

    def __init__(self, scale: float, zero_point: int, ending: Ending) -> None:
        super().__init__(ending)
        self.grid = (scale, zero_point)

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        return self.settled(real(inputs[0], *self.grid))


@kernel("x86", "requantize")
def requantize(call: Call) -> Kernel:
    check_bytes(call.node.args[0])
    return Requantize(one_number(call, call["multiplier"]), call["x_zero_point"], Ending.of(call))


# -- where bytes begin and end -------------------------------------------------------------------------------------


class QuantizeKernel(Kernel):
    """Quantize a float tensor to 8 bits in one op. NaN, which the integer form maps to 0, becomes the highest level."""

    name: ClassVar[str] = "fbgemm quantize"
    any_order: ClassVar[bool] = True

    def __init__(self, scale: float, zero_point: int, low: int, high: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.grid = (scale, zero_point, dtype)
        limits = torch.iinfo(dtype)
        self.bounds = None if (low, high) == (limits.min, limits.max) else (low, high)

    def pack(self) -> Any:
        return self.grid

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        made = to_bytes(inputs[0], *packed)
        if self.bounds is not None:
            made.clamp_(*self.bounds)
        return made.contiguous() if self.in_order else made


class Dequantize(Kernel):
    """Dequantize an 8-bit tensor."""

    name: ClassVar[str] = "fbgemm dequantize"
    any_order: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        self.grid = (scale, zero_point)

    def pack(self) -> Any:
        return self.grid

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        made = real(inputs[0], *packed)
        return made.contiguous() if self.in_order else made


@kernel("x86", "quantized_decomposed.quantize_per_tensor.default")
def quantize(call: Call) -> Kernel:
    source, *grid = call.node.args
    if grid[-1] not in BYTES or dtype_of(source) is not torch.float32:
        raise NoKernelError("the kernel makes bytes of float32")
    return QuantizeKernel(*grid)  # type: ignore[arg-type]


@kernel("x86", "quantized_decomposed.dequantize_per_tensor.default")
def dequantize(call: Call) -> Kernel:
    if dtype_of(call.node.args[0]) not in BYTES or call.node.kwargs.get("out_dtype"):
        raise NoKernelError("the kernel makes float32 of bytes")
    return Dequantize(call.node.args[1], call.node.args[2])  # type: ignore[arg-type]
