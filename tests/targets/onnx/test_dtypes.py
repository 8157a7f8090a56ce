"""Torch types and tensors as ONNX types and initializers; four bits share a byte."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from quantc.errors import RefusedError
from quantc.targets.onnx import dtypes
from quantc.targets.onnx.dtypes import BOUNDS, INT4, ONNX_TYPES, UINT4, initializer, integer_type, onnx_type

NAMES = {
    "FLOAT": "FLOAT", "UINT8": "UINT8", "INT8": "INT8", "UINT16": "UINT16", "INT16": "INT16", "INT32": "INT32",
    "INT64": "INT64", "BOOL": "BOOL", "FLOAT16": "FLOAT16", "DOUBLE": "DOUBLE", "UINT32": "UINT32", "UINT64": "UINT64",
    "BFLOAT16": "BFLOAT16", "FP8_E4M3": "FLOAT8E4M3FN", "FP8_E5M2": "FLOAT8E5M2", "UINT4": "UINT4", "INT4": "INT4",
}  # fmt: skip
"""Our names, and those of onnx."""


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_those_of_the_format(name: str) -> None:
    assert getattr(dtypes, name) == TensorProto.DataType.Value(NAMES[name])


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in ONNX_TYPES if dtype.itemsize > 1 or not dtype.is_floating_point], ids=str
)
def test_a_tensor_comes_back_from_its_initializer(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    made = initializer("w", values)
    onnx.checker.check_tensor(made)
    assert (made.name, list(made.dims)) == ("w", [2, 3])
    assert np.array_equal(numpy_helper.to_array(made).astype(np.float64), values.double().numpy())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_floats_that_numpy_lacks_keep_their_bits(dtype: torch.dtype) -> None:
    values = torch.tensor([0.5, -1.75, 0.0, -0.0, 96.0]).to(dtype)
    found = numpy_helper.to_array(initializer("w", values))
    assert torch.equal(torch.from_numpy(found.astype(np.float32)), values.float())


@pytest.mark.parametrize("kind", [INT4, UINT4])
@pytest.mark.parametrize("count", [1, 2, 16, 5])
def test_levels_of_four_bits_come_back_from_half_as_many_bytes(kind: int, count: int) -> None:
    low = BOUNDS[kind][0]
    levels = (torch.arange(count) * 7 % 16 + low).to(torch.int8)
    made = initializer("w", levels, kind)
    assert len(made.raw_data) == (count + 1) // 2
    assert np.array_equal(numpy_helper.to_array(made).astype(np.int8), levels.numpy())


def test_a_tensor_that_does_not_lie_in_order_is_written_in_order() -> None:
    values = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
    assert np.array_equal(numpy_helper.to_array(initializer("w", values)), [[0, 3], [1, 4], [2, 5]])


def test_the_smallest_type_of_levels() -> None:
    assert integer_type(-8, 7, torch.int8) == INT4
    assert integer_type(0, 15, torch.uint8) == UINT4
    assert integer_type(0, 7, torch.uint8) == INT4, "both hold it, and signed ones come first"
    assert integer_type(-8, 8, torch.int8) == TensorProto.INT8
    assert integer_type(-9, 7, torch.int8) == TensorProto.INT8
    assert integer_type(0, 16, torch.uint8) == TensorProto.UINT8
    assert integer_type(-(2**15), 2**15 - 1, torch.int16) == TensorProto.INT16


def test_what_integer_types_hold() -> None:
    for kind, ends in BOUNDS.items():
        bits = 4 if kind in (INT4, UINT4) else 8 * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind)).itemsize
        assert ends[1] - ends[0] == 2**bits - 1
        assert ends[0] in (0, -(2 ** (bits - 1)))


def test_types_that_onnx_lacks_are_refused() -> None:
    with pytest.raises(RefusedError, match="complex64"):
        onnx_type(torch.complex64)
