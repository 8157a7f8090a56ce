"""Ops as modules: sums, products and joins on a grid of their own, beside torch.ao's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as ao_quantized
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.errors import QuantcError
from quantc.nn import observers, quantize_per_tensor, quantized
from tests.support.nn_cases import both, engine, steps_apart


def _pair() -> tuple[Any, Any]:
    ours, theirs = quantized.QFunctional(), ao_quantized.QFunctional()
    ours.scale, ours.zero_point = theirs.scale, theirs.zero_point = 0.06, 101
    return ours, theirs


@pytest.mark.parametrize("name", ["add", "mul", "add_relu", "cat", "matmul"])
@pytest.mark.parametrize("engine_name", ["x86", "qnnpack"])
def test_two_tensors(name: str, engine_name: str) -> None:
    with engine(engine_name):
        torch.manual_seed(0)
        ours, theirs = _pair()
        (x, their_x), (y, their_y) = both(torch.randn(6, 6)), both(torch.randn(6, 6), (0.05, 90))
        given_to: Any = ((x, y), (their_x, their_y))
        mine, other = (([*pair],) if name == "cat" else pair for pair in given_to)
        assert steps_apart(getattr(ours, name)(*mine), getattr(theirs, name)(*other)) <= 1


NUMBERS = st.one_of(st.just(0.0), st.floats(1e-6, 40), st.floats(-40, -1e-6))
"""Products with smaller ones have scales that float32 does not hold."""


@settings(max_examples=80)
@given(number=NUMBERS, zero=st.integers(0, 255), name=st.sampled_from(["add_scalar", "mul_scalar"]))
def test_a_number(number: float, zero: int, name: str) -> None:
    with engine("x86"):
        ours, theirs = _pair()
        x, their_x = both(torch.randn(50, generator=torch.Generator().manual_seed(zero)), (0.04, zero))
        found, wanted = getattr(ours, name)(x, number), getattr(theirs, name)(their_x, number)
        step = max(found.q_scale(), wanted.q_scale())
        assert float((found.dequantize() - wanted.dequantize()).abs().max()) <= step * 1.001
        exact = x.dequantize() + number if name == "add_scalar" else x.dequantize() * number
        assert float((found.dequantize() - exact).abs().max()) <= step * 1.001


def test_broadcast_and_signed() -> None:
    ours, _ = _pair()
    x, y = torch.randn(3, 4), torch.randn(4)
    for dtype in (torch.quint8, torch.qint8):
        ours.zero_point = 101 if dtype is torch.quint8 else -20
        grid = (0.05, 100 if dtype is torch.quint8 else 3)
        a, b = quantize_per_tensor(x, *grid, dtype), quantize_per_tensor(y, *grid, dtype)
        for name, function in (("add", torch.add), ("mul", torch.mul)):
            wanted = quantize_per_tensor(function(a.dequantize(), b.dequantize()), ours.scale, ours.zero_point, dtype)
            assert steps_apart(getattr(ours, name)(a, b), wanted) == 0
        assert float(ours.add_relu(a, b).dequantize().min()) >= 0


def test_float_functional_shows_results_to_its_observer() -> None:
    module = quantized.FloatFunctional()
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for name, args in (
        ("add", (x, y)),
        ("mul", (x, y)),
        ("cat", ([x, y],)),
        ("add_relu", (x, y)),
        ("matmul", (x, y.t())),
    ):
        observer = observers.MinMaxObserver()
        module.activation_post_process = observer
        made = getattr(module, name)(*args)
        assert observer.max_val == made.max(), name
    assert torch.equal(module.add_scalar(x, 2.0), x + 2)
    assert torch.equal(module.mul_scalar(x, 2.0), x * 2)
    converted = quantized.QFunctional.from_float(module)
    assert converted.scale == float(observer.calculate_qparams()[0])
    with pytest.raises(QuantcError, match="not called itself"):
        module(x)
    with pytest.raises(QuantcError, match="add_relu"):
        converted(x)
