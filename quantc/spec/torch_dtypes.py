"""Mapping from torch's dtypes and qschemes to the engine's formats, schemes and granularities."""

from __future__ import annotations

from typing import Any

import torch

from quantc.errors import SpecError
from quantc.spec.formats import DType, Granularity, PerChannel, PerTensor, Scheme

FORMATS: dict[torch.dtype, DType] = {
    torch.qint8: DType.INT8,
    torch.int8: DType.INT8,
    torch.quint8: DType.UINT8,
    torch.uint8: DType.UINT8,
    torch.quint4x2: DType.UINT8,
    torch.qint32: DType.INT32,
    torch.int32: DType.INT32,
    torch.int16: DType.INT16,
    torch.float16: DType.FP16,
    torch.float8_e4m3fn: DType.FP8_E4M3,
    torch.float8_e5m2: DType.FP8_E5M2,
}
"""The engine's format of each dtype that an observer can have. Values of quint4x2 are stored one to a byte."""

DEFAULT_RANGES: dict[torch.dtype, tuple[int, int]] = {torch.quint4x2: (0, 15), torch.uint16: (0, 65535)}
"""Ranges that differ from the format's own."""

PLAIN: dict[torch.dtype, torch.dtype] = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.quint4x2: torch.uint8,
    torch.qint32: torch.int32,
}
"""The integer dtype underlying each quantized dtype."""

PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
FLOAT_QPARAMS = torch.per_channel_affine_float_qparams
"""Floating-point zero points, for embedding tables."""
PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric, FLOAT_QPARAMS)
SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)


def format_of(dtype: Any) -> DType:
    """The engine's format of a torch dtype. SpecError if there is none."""
    if dtype not in FORMATS:
        raise SpecError(
            f"{dtype} is not a format that tensors are quantized to",
            advice=f"take one of: {', '.join(map(str, FORMATS))}",
        )
    return FORMATS[dtype]


def scheme_of(qscheme: Any) -> Scheme:
    """The scheme of a torch qscheme."""
    return Scheme.SYMMETRIC if qscheme in SYMMETRIC else Scheme.AFFINE


def granularity_of(qscheme: Any, ch_axis: int) -> Granularity:
    """The granularity of a torch qscheme."""
    return PerChannel(axis=ch_axis) if qscheme in PER_CHANNEL else PerTensor()


def integer_range(dtype: torch.dtype, low: int | None, high: int | None, reduce_range: bool) -> tuple[int, int]:
    """The smallest and largest quantized value. `reduce_range` drops one bit, of a given range too."""
    if low is None or high is None:
        fmt = FORMATS.get(dtype, DType.INT8)
        low, high = DEFAULT_RANGES.get(dtype, (fmt.qmin, fmt.qmax))
        if fmt.bits != 8 or dtype is torch.quint4x2:
            return low, high
    elif not low <= 0 <= high or low == high:
        raise SpecError(
            f"quant_min..quant_max must contain 0 and more than one value (given: {low}..{high})",
            advice="zero must be exact, so leave it inside the range",
        )
    return (low // 2, high // 2) if reduce_range else (low, high)
