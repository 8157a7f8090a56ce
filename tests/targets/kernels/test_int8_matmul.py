"""Products of two 8-bit matrices that are both computed: exact in float32, and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_matmul import Matmul, matmul
from quantc.targets.kernels.kernel_table import NoKernelError
from tests.support.kernel_calls import call_of, levels, number

SHAPES = [((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((2, 1, 3, 4), (3, 4, 5)), ((4,), (4, 5)), ((0, 4), (4, 5))]


def exact(x: Tensor, y: Tensor, zeros: tuple[int, int]) -> Any:
    return (x.numpy().astype(np.int64) - zeros[0]) @ (y.numpy().astype(np.int64) - zeros[1])


@settings(max_examples=40)
@given(
    shapes=st.sampled_from(SHAPES),
    zeros=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    factor=st.sampled_from([0.25, 0.0078125, 1.0]),
    bounds=st.sampled_from([(0, 255), (3, 255), (20, 99)]),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_int64(
    shapes: Any, zeros: tuple[int, int], factor: float, bounds: tuple[int, int], seed: int
) -> None:
    x, y = (levels(shape, torch.uint8, "any", seed + index) for index, shape in enumerate(shapes))
    sums = exact(x, y, zeros)
    real = Matmul("matmul", zeros, None, Ending(torch.tensor([factor]), 0, 0, 0, torch.float32))
    assert np.array_equal(real(x, y).numpy(), sums * factor)
    kernel = Matmul("matmul", zeros, None, Ending(torch.tensor([factor]), 3, *bounds, torch.uint8))
    # to the nearest level, and to either of two that are equally near
    assert np.all(np.abs(kernel(x, y).numpy() - np.clip(sums * factor + 3, *bounds)) <= 0.5)


def test_the_second_factor_of_a_linear_op_has_a_row_for_each_result() -> None:
    x, w = levels((3, 4), torch.uint8, "any", 0), levels((5, 4), torch.uint8, "any", 1)
    bias = torch.arange(5, dtype=torch.int32) * 100
    kernel = Matmul("linear", (7, 9), bias, Ending(torch.tensor([0.5]), 0, 0, 0, torch.float32))
    assert np.array_equal(kernel(x, w).numpy(), (exact(x, w.t(), (7, 9)) + bias.numpy()) * 0.5)


def test_operands_may_lie_in_any_order_and_are_left_alone() -> None:
    x, y = levels((2, 4, 3), torch.uint8, "any", 0).transpose(1, 2), levels((2, 5, 4), torch.uint8, "any", 1).mT
    before = x.clone(), y.clone()
    kernel = Matmul("matmul", (7, 9), None, Ending(torch.tensor([0.01]), 3, 0, 255, torch.uint8))
    assert torch.equal(kernel(x, y), kernel(x.contiguous(), y.contiguous()))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


X, Y = levels((3, 4), torch.uint8, "any", 0), levels((4, 5), torch.uint8, "any", 1)
OUT = (None, 0, 0, 255, torch.uint8)


def reason(*args: Any) -> str:
    call, _ = call_of("matmul", *args)
    with pytest.raises(NoKernelError) as caught:
        matmul(call)
    return str(caught.value)


def test_other_products_are_refused() -> None:
    one = number(0.01)
    call, _ = call_of("matmul", X, 1, Y, torch.tensor(2), None, 1, one, *OUT)
    assert isinstance(matmul(call), Matmul)
    assert reason(X, 1, Y.to(torch.int32), None, None, 1, one, *OUT) == "a factor is a constant"
    assert reason(X, 1, Y.to(torch.int8), None, None, 1, one, *OUT) == "the kernel multiplies uint8"
    each = torch.full((5,), 0.01, dtype=torch.float64)
    assert "for each channel" in reason(X, 1, Y, None, None, 1, each, *OUT)
    assert "for each channel" in reason(X, 1, Y, torch.arange(5), None, 1, one, *OUT)
