"""Int8 linear layers on QNNPACK."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantc.errors import InputError
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel import Work
from quantc.targets.kernels.kernel_table import Call, NoKernelError
from quantc.targets.kernels.qnnpack_layer import QnnpackLayer
from quantc.targets.kernels.qnnpack_linear import QnnpackLinear, matmul
from quantc.testing.synthesis import Sketch
from tests.support.qnnpack_layers import BOUNDS, DTYPES, bounded, check, expected, integers, layer, seeded


@settings(max_examples=150)
@given(
    rows=st.integers(0, 40),
    read=st.integers(1, 90),
    made=st.integers(1, 40),
    leading=st.integers(0, 2),
    dtypes=DTYPES,
    bounds=BOUNDS,
    seed=st.integers(0, 99),
)
def test_linears(rows: int, read: int, made: int, leading: int, dtypes: Any, bounds: str, seed: int) -> None:
    generator = seeded(seed)
    of = bounded(layer("linear", integers(generator, torch.int8, made, read), seed, dtypes), bounds)
    x = integers(generator, dtypes[0], *([], [rows], [2, rows])[leading], read)
    check(QnnpackLinear(of), of, x)


@pytest.mark.parametrize("zero_point", [0, 255])
@pytest.mark.parametrize("level", [0, 255])
@pytest.mark.parametrize("weight", [-128, 127])
def test_sums_of_the_largest_products_are_not_cut_off(weight: int, level: int, zero_point: int) -> None:
    """What x86's other kernels add in 16 bits."""
    count = 512
    reach = 255 * 128 * count
    ending = Ending(torch.tensor([120 / reach]), 128, 0, 255, torch.uint8)
    of = QnnpackLayer(
        "linear", torch.full((8, count), weight, dtype=torch.int8), None, ending, None, zero_point, torch.uint8, ()
    )
    x = torch.full((5, count), level, dtype=torch.uint8)
    assert torch.equal(QnnpackLinear(of)(x), expected(of, x))


UNSIGNED = (torch.uint8, torch.uint8)


def test_columns_are_counted_since_the_kernel_does_not() -> None:
    generator = seeded(0)
    kernel = QnnpackLinear(layer("linear", integers(generator, torch.int8, 4, 8), 0, UNSIGNED))
    for shape in ((3, 7), (7,), (8, 0)):
        with pytest.raises(InputError, match="8 columns"):
            kernel(integers(generator, torch.uint8, *shape))


def test_rows_may_lie_in_any_order() -> None:
    generator = seeded(1)
    of = layer("linear", integers(generator, torch.int8, 4, 8), 1, UNSIGNED)
    x = integers(generator, torch.uint8, 8, 3).t()
    assert not x.is_contiguous()
    check(QnnpackLinear(of), of, x)


def test_the_work_is_rows_by_channels() -> None:
    kernel = QnnpackLinear(layer("linear", integers(seeded(0), torch.int8, 4, 8), 0, UNSIGNED))
    assert kernel.work(torch.empty(2, 3, 8, device="meta")) == Work("linear", 6, (8, 4))


def test_a_product_with_a_constant_matrix_is_a_linear_layer() -> None:
    generator = seeded(0)
    x, matrix = integers(generator, torch.uint8, 3, 8), integers(generator, torch.int8, 8, 5)
    made = matmul(product(x, matrix))
    assert isinstance(made, QnnpackLinear)
    sums = (x.numpy().astype(np.int64) - 7) @ matrix.numpy().astype(np.int64)
    expected = np.clip(np.rint(sums * 0.001) + 100, 0, 255)
    assert np.abs(made(x).numpy() - expected).max() <= 1


def test_a_product_with_several_matrices_is_refused() -> None:
    generator = seeded(0)
    x, matrices = integers(generator, torch.uint8, 2, 3, 8), integers(generator, torch.int8, 2, 8, 5)
    with pytest.raises(NoKernelError, match="one matrix"):
        matmul(product(x, matrices))


def product(x: Tensor, matrix: Tensor) -> Call:
    sketch = Sketch()
    first, second = sketch.input("x", x), sketch.constant("y", matrix)
    factor = sketch.constant("m", torch.tensor(0.001, dtype=torch.float64))
    target = torch.ops.quantc.matmul.default
    node = sketch.call(target, (first, 7, second, None, None, 1, factor, None, 100, 0, 255, torch.uint8))
    return Call(sketch.program(node), node)
