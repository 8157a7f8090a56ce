"""The ending of a product of integers as float kernels take it: multiplier, zero point, clamp and dtype."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel_table import Call, NoKernelError

HALF = torch.tensor(0.5, dtype=torch.float64)


def call(**arguments: Any) -> Call:
    usual = {"shift": None, "multiplier": HALF, "out_zero_point": 3, "qmin": 0, "qmax": 255, "dtype": torch.uint8}
    return cast("Call", {**usual, **arguments})


def ending(low: int, high: int, dtype: torch.dtype = torch.uint8, zero_point: int = 3) -> Ending:
    return Ending(torch.ones(1), zero_point, low, high, dtype)


def test_it_is_read_from_a_call() -> None:
    factors = torch.tensor([0.1, 0.25], dtype=torch.float64).reshape(2, 1, 1)
    found = Ending.of(call(multiplier=factors, qmax=100))
    assert found.multiplier.dtype is torch.float32
    assert found.multiplier.tolist() == np.array([0.1, 0.25], dtype=np.float32).tolist()
    assert (found.zero_point, found.low, found.high, found.dtype) == (3, 0, 100, torch.uint8)


def test_another_multiplier_may_be_given_where_an_op_has_several() -> None:
    assert Ending.of(call(multiplier=None), torch.tensor(2.0)).multiplier.tolist() == [2.0]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"shift": torch.tensor(3)}, "shifts"),
        ({"multiplier": None}, "accumulator is read as it is"),
        ({"dtype": torch.int32}, "not torch.int32"),
        ({"dtype": torch.float16}, "not torch.float16"),
    ],
)
def test_endings_that_no_kernel_has_are_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoKernelError, match=reason):
        Ending.of(call(**arguments))


@pytest.mark.parametrize(
    ("found", "cuts", "is_relu"),
    [
        (ending(0, 255), False, False),
        (ending(3, 255), True, True),
        (ending(3, 200), True, False),
        (ending(4, 255), True, False),
        (ending(0, 255, zero_point=0), False, False),
        (ending(-128, 127, torch.int8), False, False),
        (ending(3, 127, torch.int8), True, True),
        (ending(0, 127, torch.int8), True, False),
        (ending(0, 0, torch.float32), False, False),
    ],
)
def test_a_clamp_is_told_from_a_relu_and_from_none(found: Ending, cuts: bool, is_relu: bool) -> None:
    assert (found.cuts, found.is_relu) == (cuts, is_relu)


def test_floats_are_told_apart() -> None:
    assert ending(0, 0, torch.float32).is_float
    assert not ending(0, 255).is_float


def test_one_multiplier_serves_all_channels() -> None:
    one = Ending(torch.tensor([0.5]), 0, 0, 255, torch.uint8).by_channel(3)
    assert one.tolist() == [0.5, 0.5, 0.5]
    assert one.is_contiguous()
    several = torch.tensor([1.0, 2.0, 3.0])
    assert Ending(several, 0, 0, 255, torch.uint8).by_channel(3).tolist() == [1.0, 2.0, 3.0]


def test_a_bias_is_in_steps_of_the_result() -> None:
    found = Ending(torch.tensor([0.5, 2.0]), 0, 0, 255, torch.uint8)
    assert found.bias(None) is None
    made = cast("Tensor", found.bias(torch.tensor([7, -3], dtype=torch.int32).reshape(2, 1)))
    assert made.tolist() == [3.5, -6.0]
    assert made.dtype is torch.float32


def test_a_large_bias_loses_nothing_before_it_is_multiplied() -> None:
    levels = torch.tensor([2**31 - 1], dtype=torch.int32)
    made = cast("Tensor", Ending(torch.tensor([2.0**-31]), 0, 0, 255, torch.uint8).bias(levels))
    assert made.tolist() == [float(np.float32((2**31 - 1) / 2**31))]
