"""Linear layers on quantc's own kernels: weights of 4 or 8 bits, read once as they are stored, for rows of float32.

They sum x · (q − z) in float32 and take the scale times that, so results differ from the integer form by rounding alone.
Their bits depend neither on the number of threads nor on the other rows. Where a result is not finite, it is computed
again as the integer form does: sums before the scale may overflow where those of the weights themselves do not.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from quantc.errors import DataError, InputError
from quantc.targets.kernels.huge_pages import on_large_pages
from quantc.targets.kernels.kernel import Kernel, check_columns
from quantc.targets.kernels.kernel_table import Call, NoKernelError, kernel
from quantc.targets.kernels.native_library import LOADED, NoNativeError, native_library
from quantc.targets.kernels.native_packing import (
    NIBBLES,
    SHIFT,
    Grouped,
    packed_bytes,
    packed_groups,
    padded,
    unpacked_bytes,
    unpacked_groups,
)
from quantc.targets.kernels.stored_weight import StoredWeight, WeightOnly

MIN_WEIGHTS = 1 << 18
"""With fewer, a call takes longer than what it saves."""
_OPS = torch.library.Library("quantc_native", "DEF")  # type: ignore[no-untyped-call]


# -- ops: recorders of ops must see what is called -------------------------------------------------------------------


def _linear_w8(
    x: Tensor, w: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None, outputs: int, instructions: str
) -> Tensor:
    rows = x if x.dim() == 2 and x.is_contiguous() else _rows(x)
    count, inputs = rows.shape
    y = rows.new_empty((count, outputs))
    where = rows.data_ptr(), w.data_ptr(), scale.data_ptr(), _address(zero), _address(bias), y.data_ptr()
    if not _called("linear_w8", instructions, *where, count, inputs, outputs):
        levels = unpacked_bytes(w, outputs, inputs).float()
        real = (levels if zero is None else levels - zero[:outputs, None]) * scale[:outputs, None]
        y = linear(rows, real, None if bias is None else bias[:outputs])
    return y if rows is x else y.reshape([*x.shape[:-1], outputs])


def _linear_w4(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    outputs: int,
    group: int,
    has_zero: bool,
    is_short: bool,
    instructions: str,
) -> Tensor:
    rows = x if x.dim() == 2 and x.is_contiguous() else _rows(x)
    count, inputs = rows.shape
    y = rows.new_empty((count, outputs))
    where = rows.data_ptr(), w.data_ptr(), _address(bias), y.data_ptr()
    if not _called("linear_w4", instructions, *where, count, inputs, outputs, group, has_zero, is_short):
        levels, scale, zero = unpacked_groups(w, outputs, inputs, group, has_zero, is_short)
        steps = levels.float().reshape(outputs, -1, group)
        real = (steps if zero is None else steps - zero.float().unsqueeze(-1)) * scale.unsqueeze(-1)
        y = linear(rows, real.reshape(outputs, -1), None if bias is None else bias[:outputs])
    return y if rows is x else y.reshape([*x.shape[:-1], outputs])


def _called(name: str, instructions: str, *arguments: Any) -> int:
    """1 if all results are finite."""
    library = LOADED[instructions]
    made: int = library.functions[name](*arguments, torch.get_num_threads(), library.parallel)
    return made


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


SCHEMAS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "linear_w8": (
        "linear_w8(Tensor x, Tensor w, Tensor scale, Tensor? zero, Tensor? bias, int outputs, str instructions) -> Tensor",
        _linear_w8,
    ),
    "linear_w4": (
        "linear_w4(Tensor x, Tensor w, Tensor? bias, int outputs, int group, bool has_zero, bool is_short, str instructions) -> Tensor",
        _linear_w4,
    ),
}
for _name, (_schema, _function) in SCHEMAS.items():
    _OPS.define(_schema)  # type: ignore[no-untyped-call]
    torch.library.impl(f"quantc_native::{_name}", "cpu", _function, lib=_OPS)
    # results have no gradient, as those of fbgemm have none
    _OPS.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
LINEAR_W8: Any = torch.ops.quantc_native.linear_w8.default
LINEAR_W4: Any = torch.ops.quantc_native.linear_w4.default


# -- kernels -----------------------------------------------------------------------------------------------------------


class NativeLinear(WeightOnly):
    """What both have in common."""

    family: ClassVar[str] = "native"

    def __init__(self, weight: StoredWeight, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.outputs, self.inputs = weight.outputs, weight.inputs
        self.zero_dtype = None if weight.zero_point is None else weight.zero_point.dtype

    @abstractmethod
    def multiply(self, packed: Any, x: Tensor) -> Tensor:
        """The product with float32 rows of the right length."""

    def run(self, packed: Any, *inputs: Tensor) -> Any:
        x = inputs[0]
        check_columns(x, self.inputs, self.name)
        if x.dtype is not torch.float32:
            raise InputError(
                f"{self.name} was given {x.dtype}",
                where="what it reads",
                advice="call the lowered module with inputs of the dtypes it was captured for",
            )
        return self.multiply(packed, x)


class NativeW8(NativeLinear):
    """8-bit levels with a scale, and perhaps a zero point, for each output."""

    name: ClassVar[str] = "native linear, int8 weights"

    def pack(self) -> Any:
        weight, bias = self.stored, self.optional_buffer("bias")
        rows = weight.rows(weight.w)
        packed = on_large_pages(lambda: packed_bytes(rows), rows.numel())
        zero = weight.zero_point
        return (
            packed,
            padded(weight.row_scale),
            padded(None if zero is None else zero.expand(self.outputs)),
            padded(bias),
            self.outputs,
            native_library().instructions,
        )

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        levels = unpacked_bytes(packed[0], self.outputs, self.inputs)
        return {"w": levels.t().contiguous() if self.stored_transposed else levels}

    @property
    def stored_transposed(self) -> bool:
        """True if the plain weight has its outputs on the last axis."""
        return bool(self._rest[-1])

    def multiply(self, packed: Any, x: Tensor) -> Tensor:
        made: Tensor = LINEAR_W8(x, *packed)
        return made


class NativeW4(NativeLinear):
    """4-bit levels in groups."""

    name: ClassVar[str] = "native linear, int4 weights"

    def pack(self) -> Any:
        weight = self.stored
        reason = why_not_w4(weight)
        grouped = grouped_of(weight)
        if reason or grouped is None:
            raise DataError(
                f"a weight does not fit its kernel: {reason}",
                where="a state dict with other weights than those it was lowered with",
                advice="lower the program that has these weights",
            )
        packed = on_large_pages(lambda: packed_groups(grouped), weight.w.numel() // 2)
        settings = (self.outputs, grouped.group, grouped.zero_point is not None, grouped.is_short)
        return packed, padded(self.optional_buffer("bias")), *settings, native_library().instructions

    def unpack(self, packed: Any) -> dict[str, Tensor]:
        matrix, _, outputs, *settings, _ = packed
        levels, scale, zero = unpacked_groups(matrix, outputs, self.inputs, *settings)
        plain = {"w": levels, "scale": scale}
        return plain if zero is None else plain | {"zero_point": zero.to(self.zero_dtype)}

    def multiply(self, packed: Any, x: Tensor) -> Tensor:
        made: Tensor = LINEAR_W4(x, *packed)
        return made


def grouped_of(weight: StoredWeight) -> Grouped | None:
    """A weight in groups along its rows; None if it is not one."""
    is_matrix = weight.w.dim() == 2 and weight.shape is None and weight.order is None and not weight.transposed
    if not is_matrix or weight.group_size is None or weight.scale is None or not weight.w.numel():
        return None
    rows, columns = weight.w.shape
    groups = weight.scale.shape[-1] if weight.scale.dim() == 2 else 0
    if not groups or weight.scale.shape[0] != rows or columns % groups:
        return None
    return Grouped(weight.w, weight.scale, weight.zero_point)


def why_not_w4(weight: StoredWeight) -> str:
    """The reason why the kernel for 4-bit weights cannot take one; empty if it can."""
    grouped = grouped_of(weight)
    if grouped is None or grouped.levels.dtype is not torch.int8 or grouped.scale.dtype is not torch.float32:
        return "its weights are no matrix of integers in groups along the rows"
    if grouped.group % NIBBLES:
        return f"its groups have {grouped.group} weights, and the kernel reads {NIBBLES} at a time"
    if not _is_within(grouped.levels, -SHIFT, SHIFT - 1):
        return "its weights have more than four bits"
    if grouped.zero_point is not None and not _is_within(grouped.zero_point, -128, 127 - SHIFT):
        return "its zero points are no bytes"
    return ""


def _is_within(levels: Tensor, low: int, high: int) -> bool:
    lowest, highest = torch.aminmax(levels)
    return int(lowest) >= low and int(highest) <= high


# -- which is taken ------------------------------------------------------------------------------------------------------


@kernel("x86", "linear_weight_only")
def native_w8(call: Call) -> Kernel:
    weight = StoredWeight.of(call)
    if weight.group_size is not None or weight.w.dtype is not torch.int8 or weight.w.dim() != 2:
        raise NoKernelError("")
    if weight.shape is not None or weight.order is not None or weight.row_scale is None:
        raise NoKernelError("its weights are no matrix with a scale for each output")
    check_worth(weight, call["bias"])
    return NativeW8(weight, call["bias"])


@kernel("x86", "linear_weight_only")
def native_w4(call: Call) -> Kernel:
    weight = StoredWeight.of(call)
    if weight.group_size is None:
        raise NoKernelError("")
    check_worth(weight, call["bias"])
    reason = why_not_w4(weight)
    if reason:
        raise NoKernelError(reason)
    return NativeW4(weight, call["bias"])


def check_worth(weight: StoredWeight, bias: Any) -> None:
    """NoKernelError where a call would take longer than another kernel's, or there is no library."""
    if weight.w.numel() <= MIN_WEIGHTS:
        raise NoKernelError("")
    if bias is not None and not (isinstance(bias, Tensor) and bias.shape == (weight.outputs,)):
        raise NoKernelError("its bias is not a number for each output")
    try:
        native_library()
    except NoNativeError as error:
        raise NoKernelError(str(error)) from error
