"""ONNX writers of pools and of resizing: windows, padding and divisors are those of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import quantc as qc
from quantc.targets.onnx.onnx_export import export
from quantc.targets.onnx.op_writers import NoOnnxFormError
from quantc.targets.onnx.profiles import PROFILES
from quantc.targets.onnx.write_pools import PoolWindows
from tests.support.onnx_ops import (
    Cases,
    check,
    check_case,
    check_function,
    drawn,
    program_of,
    refusal,
)

X, Y, Z = (4, 6), (4, 3, 8, 8), (4, 5, 6)
"""Shapes: a matrix, images, sequences. The first size varies."""
CASES: Cases = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, size=(16, 16)), Y),
    "bilinear": (
        lambda x: (
            F.interpolate(x, scale_factor=2, mode="bilinear")
            + F.interpolate(x, size=(16, 16), mode="bilinear", align_corners=True)
        ),
        Y,
    ),
    "max-pool": (lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True) + F.max_pool2d(x, 3, 2, 1, 1), (4, 3, 9, 9)),
    "avg-pool": (lambda x: F.avg_pool2d(x, 3, 2, 1) + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), Y),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (4, 2)).sum((2, 3)) + F.adaptive_max_pool2d(x, 1).flatten(1), Y),
    "pools-1d": (lambda x: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2), Z),
}
FIXED: dict[str, tuple[Callable[..., Any], Tensor]] = {
    "average-rounded-up": (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True), torch.randn(2, 3, 8, 8)),
    "average-of-real-ones": (lambda x: F.avg_pool2d(x, 3, 2, 1, True, False), torch.randn(2, 3, 8, 8)),
    "average-beyond-the-end": (lambda x: F.avg_pool1d(x, 1, 3, 0, True), torch.randn(2, 3, 8)),
    "average-own-divisor": (lambda x: F.avg_pool2d(x, 2, 2, 1, divisor_override=3), torch.randn(2, 3, 8, 8)),
    "max-rounded-up": (lambda x: F.max_pool2d(x, (3, 1), (1, 3), (1, 0), (1, 2), True), torch.randn(1, 8, 6)),
    "one-image": (lambda x: F.max_pool2d(x, 2) - F.avg_pool2d(x, 2), torch.randn(3, 4, 6)),
    "one-image-in-cells": (lambda x: F.adaptive_avg_pool2d(x, (2, None)), torch.randn(3, 4, 6)),
    "spread-windows": (lambda x: F.max_pool1d(x, 2, 1, 1, 3), torch.randn(2, 3, 9)),
    "volumes": (lambda x: F.max_pool3d(x, 2, 1) + F.avg_pool3d(x, 2, 1), torch.randn(2, 3, 4, 4, 4)),
    "largest-in-cells": (lambda x: F.adaptive_max_pool1d(x, 3), torch.randn(2, 3, 6)),
    "nearest-smaller": (lambda x: F.interpolate(x, size=(3, 5)), torch.randn(1, 2, 7, 8)),
    "linear-longer": (lambda x: F.interpolate(x, scale_factor=1.5, mode="linear"), torch.randn(1, 2, 8)),
}
"""For the size they were captured with."""


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_what_torch_has(name: str) -> None:
    check_case(CASES[name])


@pytest.mark.parametrize("name", FIXED)
def test_a_corner_is_what_torch_has(name: str) -> None:
    function, x = FIXED[name]
    check_function(function, x)


def test_divisors_of_windows_that_reach_over_the_padding() -> None:
    """Six numbers with a zero on either side, in windows of 3 every 2, the last of which is rounded up."""
    windows = PoolWindows(kernel=3, stride=2, padding=1, dilation=1, size=6, count=4)
    assert windows.counted(includes_padding=True) == [3, 3, 3, 2]
    assert windows.counted(includes_padding=False) == [2, 3, 3, 1]
    assert windows.end == 2


def test_the_padding_that_the_last_window_needs() -> None:
    assert PoolWindows(2, 2, 0, 1, size=6, count=3).end == 0
    assert PoolWindows(2, 2, 0, 1, size=7, count=4).end == 1
    assert PoolWindows(3, 1, 1, 2, size=5, count=3).end == 1, "a kernel of 3 spread by 2 reaches over 5"
    assert PoolWindows(3, 2, 1, 1, size=None, count=None).end == 1


def test_windows_that_could_start_behind_the_end() -> None:
    assert PoolWindows(3, 2, 1, 1, None, None).follows_onnx
    assert not PoolWindows(1, 3, 0, 1, None, None).follows_onnx
    assert not PoolWindows(2, 2, 1, 1, None, None).follows_onnx


def test_cells_of_several_sizes_are_refused() -> None:
    assert "cells of several sizes" in refusal(lambda x: F.adaptive_avg_pool2d(x, 2), drawn(4, 3, 5, 5))


def test_windows_that_are_rounded_up_need_a_fixed_size() -> None:
    class Pool(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.avg_pool1d(x, 2, 2, ceil_mode=True)

    x = drawn(4, 3, 7)
    check(Pool(), program_of(Pool(), x, is_open=True), drawn(9, 3, 7))
    open_length = qc.capture(Pool().eval(), (x,), dynamic_shapes=({2: Dim("length", min=4, max=32)},))
    with pytest.raises(NoOnnxFormError, match="rounds the number of its windows up"):
        export(open_length, PROFILES["onnxruntime"])
