"""Weights in narrower float formats: divided by their scales, clamped, and cast as torch casts."""

from __future__ import annotations

import pytest
import torch

from quantc.qdq.float_ops import DEQUANTIZE, QUANTIZE, dequantize_float, quantize_float

FORMATS = (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", FORMATS)
def test_without_a_scale_it_is_a_cast(dtype: torch.dtype) -> None:
    x = drawn(5, 7)
    assert torch.equal(quantize_float(x, None, None, dtype).float(), x.to(dtype).float())
    assert torch.equal(dequantize_float(x.to(dtype), None, None), x.to(dtype).float())


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_beyond_the_largest_become_it(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest, largest * 2, -largest * 2, 1e38, -1e38])
    assert quantize_float(x, None, None, dtype).float().tolist() == [largest, largest, -largest, largest, -largest]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scales_lie_along_their_axis(axis: int) -> None:
    x = drawn(3, 3, 3)
    scale = torch.tensor([0.25, 2.0, 16.0])  # powers of two, by which nothing is rounded
    found = quantize_float(x, scale, axis, torch.float8_e4m3fn)
    back = dequantize_float(found, scale, axis)
    for index, step in enumerate(scale.tolist()):
        expected = (x.select(axis, index) / step).to(torch.float8_e4m3fn)
        assert torch.equal(found.select(axis, index).float(), expected.float())
        assert torch.equal(back.select(axis, index), expected.float() * step)


def test_one_scale_serves_all() -> None:
    x, scale = drawn(4, 5), torch.tensor(0.5)
    found = quantize_float(x, scale, None, torch.float8_e5m2)
    assert torch.equal(found.float(), (x * 2).to(torch.float8_e5m2).float())
    assert torch.equal(dequantize_float(found, scale, None), found.float() / 2)


def test_what_was_quantized_is_quantized_to_itself() -> None:
    x, scale = drawn(4, 5), torch.tensor([0.1, 0.3, 0.7, 3.0])
    once = quantize_float(x, scale, 0, torch.float8_e4m3fn)
    again = quantize_float(dequantize_float(once, scale, 0), scale, 0, torch.float8_e4m3fn)
    assert torch.equal(once.float(), again.float())


def test_what_is_no_number_stays_none_and_halves_are_taken_too() -> None:
    x = torch.tensor([torch.nan, 1.5], dtype=torch.float16)
    found = quantize_float(x, torch.tensor(1.0), None, torch.float8_e5m2).float()
    assert found.isnan().tolist() == [True, False]
    assert dequantize_float(x, None, None).dtype is torch.float32


def test_the_ops_are_the_functions() -> None:
    x, scale = drawn(2, 3), torch.tensor([0.5, 4.0])
    q = QUANTIZE(x, scale, 0, torch.float8_e4m3fn)
    assert torch.equal(q.float(), quantize_float(x, scale, 0, torch.float8_e4m3fn).float())
    assert torch.equal(DEQUANTIZE(q, scale, 0), dequantize_float(q, scale, 0))
    assert torch.ops.quantc.quantize_float.default is QUANTIZE
