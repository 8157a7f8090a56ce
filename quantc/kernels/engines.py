"""The one place where torch's quantized dtypes are used: packing weights for fbgemm and QNNPACK.

torch means to remove these dtypes. Everything else here works on plain int8 tensors.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantc.errors import MissingDependencyError

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


def quantized_weight(levels: Tensor, scale: Tensor, axis: int = 0) -> Tensor:
    """Integers and their scales as a tensor of torch's quantized dtype; call it with an engine chosen."""
    if not scale.dim():
        return torch._make_per_tensor_quantized_tensor(levels, float(scale), 0)  # pyright: ignore[reportPrivateImportUsage]
    zeros = torch.zeros(scale.shape, dtype=torch.int64)
    return torch._make_per_channel_quantized_tensor(  # pyright: ignore[reportPrivateImportUsage]
        levels, scale.double(), zeros, axis
    )


def packed_linear(name: str, levels: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """A linear layer's weight, packed."""
    with engine(name):
        return torch.ops.quantized.linear_prepack(quantized_weight(levels.contiguous(), scale), bias)


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
    """Bytes as a tensor of torch's quantized dtype, on the same memory."""
    dtype = torch.quint8 if x.dtype is torch.uint8 else torch.qint8
    made: Tensor = torch._empty_affine_quantized(  # pyright: ignore[reportPrivateImportUsage]
        [0], scale=scale, zero_point=zero_point, dtype=dtype
    )
    storage = torch.storage.TypedStorage(wrap_storage=x.untyped_storage(), dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
    return made.set_(storage, x.storage_offset(), x.shape, x.stride())


def as_bytes(q: Tensor) -> Tensor:
    """The integers of a tensor of torch's quantized dtype, on the same memory."""
    made = torch.empty(0, dtype=torch.uint8 if q.dtype is torch.quint8 else torch.int8)
    return made.set_(q.untyped_storage(), q.storage_offset(), q.shape, q.stride())


def quiet() -> None:
    """Let torch warn of quantized dtypes here, where nobody hears it: it does so once in a process."""
    with _ENGINE, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor(UNUSED, 1.0, 0, torch.quint8)


def bytes_on_grid(x: Tensor, scale: float, zero_point: int, highest: int) -> Tensor:
    """A float tensor on a grid of levels from 0; call `quiet` once before.

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
