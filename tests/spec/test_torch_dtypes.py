"""Torch's dtypes and qschemes as formats, schemes, granularities and ranges."""

from __future__ import annotations

import pytest
import torch
from torch.ao.quantization.observer import MinMaxObserver

from quantc.errors import SpecError
from quantc.spec.formats import PerChannel, PerTensor, Scheme
from quantc.spec.torch_dtypes import (
    FLOAT_QPARAMS,
    FORMATS,
    PER_CHANNEL,
    PER_TENSOR,
    PLAIN,
    format_of,
    granularity_of,
    integer_range,
    scheme_of,
)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32], ids=str)
def test_the_plain_dtype_is_what_a_quantized_tensor_holds(dtype: torch.dtype) -> None:
    made = torch.quantize_per_tensor(torch.ones(1), 1.0, 0, dtype)
    assert made.int_repr().dtype is PLAIN[dtype]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_format_is_stored_in_the_dtype_it_stands_for(dtype: torch.dtype) -> None:
    assert format_of(dtype).storage is PLAIN.get(dtype, dtype)


def test_a_dtype_that_tensors_are_not_quantized_to_is_refused() -> None:
    with pytest.raises(SpecError, match=r"torch\.float64") as caught:
        format_of(torch.float64)
    assert caught.value.advice is not None
    assert "torch.qint8" in caught.value.advice


def test_schemes_and_granularities_follow_their_names() -> None:
    for qscheme in (*PER_TENSOR, *PER_CHANNEL):
        name = str(qscheme)
        assert scheme_of(qscheme) is (Scheme.SYMMETRIC if "symmetric" in name else Scheme.AFFINE)
        assert granularity_of(qscheme, 2) == (PerChannel(axis=2) if "per_channel" in name else PerTensor())
    assert granularity_of(FLOAT_QPARAMS, 0) == PerChannel(axis=0)


OBSERVED = [torch.qint8, torch.quint8, torch.quint4x2, torch.qint32, torch.int8, torch.uint8, torch.int16, torch.int32]


@pytest.mark.parametrize("reduce_range", [False, True])
@pytest.mark.parametrize("dtype", OBSERVED, ids=str)
def test_ranges_are_those_of_torchs_observers(dtype: torch.dtype, reduce_range: bool) -> None:
    torchs = MinMaxObserver(dtype=dtype, reduce_range=reduce_range)
    assert integer_range(dtype, None, None, reduce_range) == (torchs.quant_min, torchs.quant_max)


@pytest.mark.parametrize("reduce_range", [False, True])
def test_a_given_range_is_reduced_as_torch_does(reduce_range: bool) -> None:
    torchs = MinMaxObserver(dtype=torch.qint8, quant_min=-100, quant_max=99, reduce_range=reduce_range)
    assert integer_range(torch.qint8, -100, 99, reduce_range) == (torchs.quant_min, torchs.quant_max)


@pytest.mark.parametrize(("low", "high"), [(1, 5), (-5, -1), (0, 0)])
def test_a_range_without_zero_or_of_one_value_is_refused(low: int, high: int) -> None:
    with pytest.raises(SpecError, match=rf"{low}\.\.{high}"):
        integer_range(torch.qint8, low, high, False)
