"""The one place where torch's quantized dtypes are used: packing weights for fbgemm and QNNPACK.

torch means to remove these dtypes. Everything else here works on plain int8 tensors.
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
    """Let torch pack for an engine: it has one for the whole process, which is put back."""
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
    """Integers and their scales as a tensor of torch's quantized dtype; call it with an engine chosen.

    `zero_points` has one for each scale; None if all are 0.
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
    """A linear layer's weight, packed."""
    with engine(name):
        weight = quantized_weight(levels.contiguous(), scale)
        return on_large_pages(lambda: torch.ops.quantized.linear_prepack(weight, bias), weight.numel())


def packed_for_qnnpack(
    op: str, levels: Tensor, scale: Tensor, zero_points: Tensor | None, bias: Tensor | None, *window: Any
) -> Any:
    """The weight of one of QNNPACK's products, packed: `op` is `linear`, `conv2d`, `conv_transpose1d`, ….

    Scales belong to axis 0, but to axis 1 in transposed convolutions.
    """
    axis = 1 if "transpose" in op else 0
    with engine("qnnpack"):
        weight = quantized_weight(levels.contiguous(), scale, axis, zero_points)
        return getattr(torch.ops.quantized, f"{op}_prepack")(weight, bias, *window)


def unpacked_by_qnnpack(op: str, packed: Any) -> Tensor | None:
    """The integers of a packed weight, as they were given; None if torch cannot give them back."""
    if op == "conv3d":
        return None
    # torch packs rows as images, and unpacks them by taking the axis away in place: the second time, there is none
    is_row = "1d" in op
    found: Tensor = getattr(torch.ops.quantized, f"{op.replace('1d', '2d')}_unpack")(packed)[0]
    levels = found.int_repr()
    return (levels.squeeze(2) if is_row else levels).contiguous()


def product_with_packed(op: str) -> Any:
    """torch's op that multiplies with a packed weight: `linear_relu`, `conv2d`, …. Some have an older form too."""
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
    """A convolution's weight, packed; `window` is stride, padding, dilation, groups."""
    with engine(name):
        weight = quantized_weight(levels.contiguous(), scale, zero_points=zero_points)
        return _PREPACK[levels.dim() - 2](weight, bias, *window)


def unpacked_conv(packed: Any, axes: int) -> Tensor:
    """The integers of a convolution's weight."""
    levels: Tensor = _UNPACK[axes](packed)[0].int_repr()
    return levels


def packed_cell(ih: Any, hh: Any, reduced: bool) -> Any:
    """The packed weights of one layer of an LSTM or GRU, for the two functions below."""
    return torch.ops.quantized.make_quantized_cell_params_dynamic(ih, hh, UNUSED, UNUSED, reduced)


def lstm_dynamic(x: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of an LSTM over a sequence; `layout` is number of layers, both directions, batch first."""
    layers, both, batch_first = layout
    settings = (True, layers, 0.0, False, both, batch_first)
    return torch.quantized_lstm(x, state, cells, *settings, dtype=torch.qint8, use_dynamic=True)


def gru_dynamic(x: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of a GRU over a sequence."""
    layers, both, batch_first = layout
    return torch.quantized_gru(x, state[0], cells, True, layers, 0.0, False, both, batch_first)


def lstm_of_packed(x: Tensor, batch_sizes: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of an LSTM over sequences of several lengths; `layout` is number of layers, both directions."""
    layers, both = layout
    settings = (True, layers, 0.0, False, both)
    return torch.quantized_lstm(x, batch_sizes, state, cells, *settings, dtype=torch.qint8, use_dynamic=True)


def gru_of_packed(x: Tensor, batch_sizes: Tensor, state: Sequence[Tensor], cells: Sequence[Any], *layout: Any) -> Any:
    """All layers of a GRU over sequences of several lengths."""
    layers, both = layout
    return torch.quantized_gru(x, batch_sizes, state[0], cells, True, layers, 0.0, False, both)


@cache
def hush() -> None:
    """Have torch say once, where nobody hears it, that quantized dtypes will be removed: it says so at first use only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor(torch.zeros(1), 1.0, 0, torch.quint8)


def to_bytes(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """A float tensor rounded to uint8 or int8, in one go."""
    return as_bytes(torch.quantize_per_tensor(x, scale, zero_point, _QUANTIZED[dtype]))


_QUANTIZED = {torch.uint8: torch.quint8, torch.int8: torch.qint8}


def as_quantized(x: Tensor, scale: float = 1.0, zero_point: int = 0) -> Tensor:
    """Bytes as a tensor of torch's quantized dtype, on the same memory. A scale below 0 turns the sign of all numbers."""
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
    """The integers of a tensor of torch's quantized dtype, on the same memory."""
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
    """torch's op on a quantized tensor: called with that, a packed weight, scale and zero point of the result."""
    return ON_QUANTIZED_RELU if relu else ON_QUANTIZED


def product_of_floats(relu: bool) -> Any:
    """torch's op that rounds float32 itself: called with that, its scale and zero point, and a packed weight."""
    return ON_FLOATS_RELU if relu else ON_FLOATS


def unpacked_linear(packed: Any) -> Tensor:
    """The integers that `packed_linear` packed."""
    levels: Tensor = torch.ops.quantized.linear_unpack(packed)[0].int_repr()
    return levels


def quantized_rows(x: Tensor, scale: float | None, zero_point: int) -> Tensor:
    """Float32 rounded onto a grid; or if that has no scale, bytes that are in order in memory, taken as of scale 1."""
    if scale is not None:
        return torch.quantize_per_tensor(x, scale, zero_point, torch.quint8)
    if x.numel() <= COPIED_IN:
        return torch._make_per_tensor_quantized_tensor(x, 1.0, zero_point)  # pyright: ignore[reportPrivateImportUsage]
    return as_quantized(x, 1.0, zero_point)


def linear_to_bytes(rows: Tensor, packed: Any, zero_point: int, relu: bool) -> Tensor:
    """The product of rows that `quantized_rows` made, rounded to steps of 1."""
    made = product_of_quantized(relu)(rows, packed, 1.0, zero_point)
    return made.int_repr() if made.numel() <= COPIED_OUT else as_bytes(made)


def linear_to_floats(x: Tensor, scale: float | None, zero_point: int, packed: Any, relu: bool) -> Tensor:
    """The product of float32, rounded onto a grid on the way, or of bytes where that has no scale."""
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
    """The largest bytes of windows over images: sizes, strides, padding, dilation, whether the last may reach out."""
    return as_bytes(torch.ops.quantized.max_pool2d(as_quantized(x), *window))


def bytes_on_grid(x: Tensor, scale: float, zero_point: int, highest: int) -> Tensor:
    """A float tensor on a grid of levels from 0.

    torch's op adds the zero point before it rounds, so that what is halfway between two levels may go to the other one.
    """
    levels = as_bytes(torch.quantize_per_tensor(x, scale, zero_point, torch.quint8))
    return levels if highest == 255 else levels.clamp_(max=highest)


# -- float16 weights: fbgemm multiplies float32 with them, and adds in float32 -------------------------------------------


def has_halves() -> bool:
    """Whether this build of torch can multiply with float16 weights."""
    return "fbgemm" in torch.backends.quantized.supported_engines and hasattr(torch, "fbgemm_pack_gemm_matrix_fp16")


def packed_halves(matrix: Tensor) -> Tensor:
    """A matrix with a row for each output, packed for one thread."""
    with engine("fbgemm"):
        packed = torch.fbgemm_pack_gemm_matrix_fp16(matrix.contiguous())
        multiply_halves(matrix.new_zeros([1, matrix.shape[1]]), packed, None)  # torch warns of it at the first call
    return packed


def multiply_halves(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.fbgemm_linear_fp16_weight_fp32_activation(x, packed, bias)


def packed_halves_for_threads(matrix: Tensor, bias: Tensor | None) -> Any:
    """The same with its bias, for a kernel that uses several threads."""
    with engine("fbgemm"):
        return torch.ops.quantized.linear_prepack_fp16(matrix.contiguous(), bias)


def multiply_halves_on_threads(x: Tensor, packed: Any) -> Tensor:
    made: Tensor = torch.ops.quantized.linear_dynamic_fp16(x, packed)
    return made


def packed_half_cell(ih: tuple[Tensor, Tensor | None], hh: tuple[Tensor, Tensor | None]) -> Any:
    """The float16 weights of one layer of an LSTM or GRU, each with its bias, for `lstm_dynamic` and `gru_dynamic`."""
    packed = [packed_halves_for_threads(*each) for each in (ih, hh)]
    return torch.ops.quantized.make_quantized_cell_params_fp16(*packed)
