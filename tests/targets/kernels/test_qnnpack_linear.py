"""Int8 linear layers on QNNPACK."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.qnnpack_layer import QnnpackLayer
from quantc.targets.kernels.qnnpack_linear import QnnpackLinear
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
