"""Weight packing for fbgemm and QNNPACK: the only module that uses torch's quantized dtypes.

torch plans to remove these dtypes. Everything else works on plain int8 tensors.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from quantc.errors import MissingDependencyError
from quantc.targets.kernels.huge_pages import on_large_pages

_ENGINE = threading.Lock()
UNUSED = torch.zeros(1)
"""In the place of biases that torch's recurrent ops take and do not read: they read those packed with the weights."""


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Context manager that selects torch's process-wide quantized engine and restores it afterwards."""
    known = torch.backends.quantized.supported_engines
    if name not in known:
        raise MissingDependencyError(
            f"this build of torch has no quantized engine {name!r}",
            where="qc.lower",
            advice=f"it has {', '.join(known)}: lower for another target, or install a build of torch that has it",
        )
    with _ENGINE, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of quantized dtypes on every use
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = name
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


def quantized_weight(levels: Tensor, scale: Tensor, axis: int = 0, zero_points: Tensor | None = None) -> Tensor:
    """Integers and scales as a tensor of torch's quantized dtype; call it inside `engine`.

    `zero_points` has one entry per scale; None if all are 0.
    """
    zeros = torch.zeros(scale.shape, dtype=torch.int64) if zero_points is None else zero_points.long()
    if not scale.dim():
        return torch._make_per_tensor_quantized_tensor(  # pyright: ignore[reportPrivateImportUsage]
            levels, float(scale), int(zeros)
        )
    return torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateImportUsage]
        levels, scale.double(), zeros, axis
    )


def packed_linear(name: str, levels: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """Packed weight of a linear layer."""
    with engine(name):
        weight = quantized_weight(levels.contiguous(), scale)
        return on_large_pages(lambda: torch.ops.quantized.linear_prepack(weight, bias), weight.numel())


def packed_for_qnnpack(
    op: str, levels: Tensor, scale: Tensor, zero_points: Tensor | None, bias: Tensor | None, *window: Any
) -> Any:
    """Packed weight of a QNNPACK op: `op` is `linear`, `conv2d`, `conv_transpose1d`, ….

    Scales are along axis 0, but along axis 1 in transposed convolutions.
    """
    axis = 1 if "transpose" in op else 0
    with engine("qnnpack"):
        weight = quantized_weight(levels.contiguous(), scale, axis, zero_points)
        return getattr(torch.ops.quantized, f"{op}_prepack")(weight, bias, *window)


def unpacked_by_qnnpack(op: str, packed: Any) -> Tensor | None:
    """The original integers of a packed weight; None if torch cannot unpack them."""
    if op == "conv3d":
        return None
    # torch packs rows as images, and unpacks them by taking the axis away in place: the second time, there is none
    is_row = "1d" in op
    found: Tensor = getattr(torch.ops.quantized, f"{op.replace('1d', '2d')}_unpack")(packed)[0]
    levels = found.int_repr()
    return (levels.squeeze(2) if is_row else levels).contiguous()


def product_with_packed(op: str) -> Any:
    """torch's op on a packed weight: `linear_relu`, `conv2d`, …. Some have an older overload too."""
    found = getattr(torch.ops.quantized, op)
    return found.new if "new" in found.overloads() else found.default


CONVS: dict[int, Any] = {2: torch.ops.quantized.conv2d.new, 3: torch.ops.quantized.conv3d.new}
CONVS_RELU: dict[int, Any] = {2: torch.ops.quantized.conv2d_relu.new, 3: torch.ops.quantized.conv3d_relu.new}
"""By the number of axes; called with what `as_quantized` gives, what `packed_conv` gives, scale and zero point."""
_PREPACK: dict[int, Any] = {2: torch.ops.quantized.conv2d_prepack, 3: torch.ops.quantized.conv3d_prepack}
_UNPACK: dict[int, Any] = {2: torch.ops.quantized.conv2d_unpack, 3: torch.ops.quantized.conv3d_unpack}


def packed_conv(
    name: str, levels: Tensor, scale: Tensor, zero_points: Tensor | None, bias: Tensor | None, *window: Any
) -> Any:
    """Packed weight of a convolution; `window` is stride, padding, dilation, groups."""
    with engine(name):
        weight = quantized_weight(levels.contiguous(), scale, zero_points=zero_points)
        return _PREPACK[levels.dim() - 2](weight, bias, *window)


def unpacked_conv(packed: Any, axes: int) -> Tensor:
    """The integers of a packed convolution weight."""
    levels: Tensor = _UNPACK[axes](packed)[0].int_repr()
    return levels


def packed_cell(ih: Any, hh: Any, reduced: bool) -> Any:
    """Packed weights of one LSTM or GRU layer, for the two functions below."""
    return torch.ops.quantized.make_quantized_cell_params_dynamic(ih, hh, UNUSED, UNUSED, reduced)


def lstm_dynamic(x: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of an LSTM over a sequence; `layout` is (number of layers, bidirectional, batch first)."""
    layers, both, batch_first = layout
    settings = (True, layers, 0.0, False, both, batch_first)
    return torch.quantized_lstm(x, state, cells, *settings, dtype=torch.qint8, use_dynamic=True)


def gru_dynamic(x: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of a GRU over a sequence; `layout` as in `lstm_dynamic`."""
    layers, both, batch_first = layout
    return torch.quantized_gru(x, state[0], cells, True, layers, 0.0, False, both, batch_first)


def lstm_of_packed(x: Tensor, batch_sizes: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of an LSTM over packed sequences; `layout` is (number of layers, bidirectional)."""
    layers, both = layout
    settings = (True, layers, 0.0, False, both)
    return torch.quantized_lstm(x, batch_sizes, state, cells, *settings, dtype=torch.qint8, use_dynamic=True)


def gru_of_packed(x: Tensor, batch_sizes: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of a GRU over packed sequences; `layout` as in `lstm_of_packed`."""
    layers, both = layout
    return torch.quantized_gru(x, batch_sizes, state[0], cells, True, layers, 0.0, False, both)


@cache
def hush() -> None:
    """Trigger and suppress torch's deprecation warning for quantized dtypes, which it emits at first use only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


def to_bytes(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Quantize a float tensor to uint8 or int8 in one op."""
    return as_bytes(torch.quantize_per_tensor(x, scale, zero_point, _QUANTIZED[dtype]))


_QUANTIZED = {torch.uint8: torch.quint8, torch.int8: torch.qint8}


def as_quantized(x: Tensor, scale: float = 1.0, zero_point: int = 0) -> Tensor:
    """An 8-bit tensor as torch's quantized dtype, sharing memory. A negative scale flips the sign of all values."""
    empty = _on_grid(scale, zero_point, _QUANTIZED[x.dtype])
    return empty.detach().set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


@lru_cache(maxsize=4096)
def _on_grid(scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """A tensor without elements on a grid. To put another on its memory takes half as long as to make one anew."""
    made: Tensor = torch._empty_affine_quantized(  # pyright: ignore[reportPrivateImportUsage]
        [0], scale=scale, zero_point=zero_point, dtype=dtype
    )
    return made


def as_bytes(q: Tensor) -> Tensor:
    """The integers of a quantized tensor, sharing memory."""
    return _PLAIN[q.dtype].detach().set_(q.untyped_storage(), q.storage_offset(), q.shape, q.stride())


_PLAIN = {quantized: torch.empty(0, dtype=plain) for plain, quantized in _QUANTIZED.items()}


# -- linear layers: rows of bytes or of float32, with a weight that `packed_linear` made for fbgemm -----------------------

COPIED_IN = 2**17
COPIED_OUT = 2**12
"""Up to so many bytes a copy, one step, is faster than a look at the same memory, which takes Python several."""
ON_QUANTIZED: Any = torch.ops.quantized.linear.default
ON_QUANTIZED_RELU: Any = torch.ops.quantized.linear_relu.default
ON_FLOATS: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default
ON_FLOATS_RELU: Any = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_relu_output_fp32.default


def product_of_quantized(relu: bool) -> Any:
    """torch's linear op on a quantized tensor; arguments: tensor, packed weight, scale and zero point of the result."""
    return ON_QUANTIZED_RELU if relu else ON_QUANTIZED


def product_of_floats(relu: bool) -> Any:
    """torch's linear op that quantizes float32 itself; arguments: tensor, its scale and zero point, packed weight."""
    return ON_FLOATS_RELU if relu else ON_FLOATS


def unpacked_linear(packed: Any) -> Tensor:
    """The integers of a weight packed by `packed_linear`."""
    levels: Tensor = torch.ops.quantized.linear_unpack(packed)[0].int_repr()
    return levels


def quantized_rows(x: Tensor, scale: float | None, zero_point: int) -> Tensor:
    """Float32 rows quantized with `scale`; without a scale, contiguous 8-bit rows taken as of scale 1."""
    if scale is not None:
        return torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
    if x.numel() <= COPIED_IN:
        return torch._make_per_tensor_quantized_tensor(x, 1.0, zero_point)  # pyright: ignore[reportPrivateImportUsage]
    return as_quantized(x, 1.0, zero_point)


def linear_to_bytes(rows: Tensor, packed: Any, zero_point: int, relu: bool) -> Tensor:
    """Linear of rows made by `quantized_rows`, requantized to scale 1."""
    made = product_of_quantized(relu)(rows, packed, 1.0, zero_point)
    return made.int_repr() if made.numel() <= COPIED_OUT else as_bytes(made)


def linear_to_floats(x: Tensor, scale: float | None, zero_point: int, packed: Any, relu: bool) -> Tensor:
    """Linear with float32 result, of float32 rows quantized on the way, or of 8-bit rows if `scale` is None."""
    reals = quantized_rows(x, None, zero_point).dequantize() if scale is None else x
    made: Tensor = product_of_floats(relu)(reals, scale or 1.0, zero_point, packed)
    return made


BYTEWISE: dict[str, Any] = {
    "add": torch.ops.quantized.add.out,
    "add relu": torch.ops.quantized.add_relu.out,
    "mul": torch.ops.quantized.mul.out,
    "mul relu": torch.ops.quantized.mul_relu.out,
}
"""Ops on two tensors of one shape that write into a third. Those that make it themselves are others on each engine."""


def max_of_windows(x: Tensor, *window: Any) -> Tensor:
    """2D max pool of 8-bit images; `window` is sizes, strides, padding, dilation, ceil mode."""
    return as_bytes(torch.ops.quantized.max_pool2d(as_quantized(x), *window))


def bytes_on_grid(x: Tensor, scale: float, zero_point: int, highest: int) -> Tensor:
    """A float tensor quantized to levels 0..highest.

    torch's op adds the zero point before it rounds, so a value halfway between two levels may round to the other one.
    """
    levels = as_bytes(torch.quantize_per_tensor(x, scale, zero_point, torch.quint8))
    return levels if highest == 255 else levels.clamp_(max=highest)


# -- float16 weights: fbgemm multiplies float32 with them, and adds in float32 -------------------------------------------


def has_halves() -> bool:
    """True if this build of torch can multiply by float16 weights."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(torch, "fbgemm_pack_gemm_matrix_fp16")


def packed_halves(matrix: Tensor) -> Tensor:
    """Matrix with one row per output, packed for one thread."""
    with engine("fbgemm"):
        packed = torch.fbgemm_pack_gemm_matrix_fp16(matrix.contiguous())
        multiply_halves(matrix.new_zeros([1, matrix.shape[1]]), packed, None)  # torch warns of it at the first call
    return packed


def multiply_halves(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, bias)


def packed_halves_for_threads(matrix: Tensor, bias: Tensor | None) -> Any:
    """Matrix and bias, packed for the multithreaded kernel."""
    with engine("fbgemm"):
        return torch.ops.quantized.linear_prepack_fp16(matrix.contiguous(), bias)


def multiply_halves_on_threads(x: Tensor, packed: Any) -> Tensor:
    made: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return made


def packed_half_cell(ih: tuple[Tensor, Tensor | None], hh: tuple[Tensor, Tensor | None]) -> Any:
    """Float16 weights of one LSTM or GRU layer, each with its bias, for `lstm_dynamic` and `gru_dynamic`."""
    packed = [packed_halves_for_threads(*each) for each in (ih, hh)]
    return torch.ops.quantized.make_quantized_cell_params_fp16(*packed)
