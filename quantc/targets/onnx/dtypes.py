"""Conversion of torch dtypes and tensors to ONNX types and initializers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantc.errors import RefusedError
from quantc.support.optional_dependency import extra
from quantc.text.digests import raw_bytes

FLOAT, UINT8, INT8, UINT16, INT16, INT32, INT64, BOOL = 1, 2, 3, 4, 5, 6, 7, 9
FLOAT16, DOUBLE, UINT32, UINT64, BFLOAT16, FP8_E4M3, FP8_E5M2, UINT4, INT4 = 10, 11, 12, 13, 16, 17, 19, 21, 22
"""As onnx.TensorProto numbers them, which is part of the format."""

ONNX_TYPES: dict[torch.dtype, int] = {
    torch.float32: FLOAT,
    torch.float64: DOUBLE,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.float8_e4m3fn: FP8_E4M3,
    torch.float8_e5m2: FP8_E5M2,
    torch.int8: INT8,
    torch.uint8: UINT8,
    torch.int16: INT16,
    torch.uint16: UINT16,
    torch.int32: INT32,
    torch.uint32: UINT32,
    torch.int64: INT64,
    torch.uint64: UINT64,
    torch.bool: BOOL,
}
NIBBLES: dict[int, tuple[int, int]] = {INT4: (-8, 7), UINT4: (0, 15)}
"""Types of four bits, two of which share a byte, and what they hold."""
BOUNDS: dict[int, tuple[int, int]] = {
    **NIBBLES,
    **{ONNX_TYPES[kind]: (torch.iinfo(kind).min, torch.iinfo(kind).max) for kind in (torch.int8, torch.uint8)},
    **{ONNX_TYPES[kind]: (torch.iinfo(kind).min, torch.iinfo(kind).max) for kind in (torch.int16, torch.int32)},
    UINT16: (0, 2**16 - 1),
}
"""Value range of each integer type."""


def onnx_module() -> Any:
    """The onnx package; MissingDependencyError if it is not installed."""
    return extra("onnx", "onnx", 'qc.lower(..., "onnx")')


def onnx_type(dtype: torch.dtype) -> int:
    """ONNX type of a torch dtype."""
    if dtype not in ONNX_TYPES:
        raise RefusedError(f"ONNX has no type for {dtype}", advice="cast to another type in the model")
    return ONNX_TYPES[dtype]


def integer_type(qmin: int, qmax: int, storage: torch.dtype) -> int:
    """Smallest ONNX type for levels qmin..qmax: 4-bit if they fit, else the type of the storage dtype."""
    fitting = (kind for kind, (low, high) in NIBBLES.items() if low <= qmin and qmax <= high)
    return next(fitting, onnx_type(storage))


def initializer(name: str, value: Tensor, kind: int | None = None) -> Any:
    """An initializer of the model; `kind` INT4 and UINT4 pack two levels per byte."""
    helper = onnx_module().helper
    value = value.detach().cpu().contiguous()
    kind = onnx_type(value.dtype) if kind is None else kind
    if kind in NIBBLES:
        raw = _pack_nibbles(value)
    elif value.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        raw = raw_bytes(value).tobytes()  # numpy has no such types
    else:
        raw = value.numpy().tobytes()
    return helper.make_tensor(name, kind, list(value.shape), raw, raw=True)


def _pack_nibbles(levels: Tensor) -> bytes:
    """Levels of four bits, the first in the low half of a byte."""
    flat = levels.reshape(-1).to(torch.int16).numpy().astype(np.uint8) & 0xF
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return bytes((flat[0::2] | (flat[1::2] << 4)).astype(np.uint8))
