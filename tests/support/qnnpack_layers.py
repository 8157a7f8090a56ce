"""Layers as QNNPACK takes them, and their results by torch's products in float64, which are exact for bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.kernel import Kernel
from quantc.targets.kernels.qnnpack_layer import QnnpackLayer

BYTES = (torch.uint8, torch.int8)
CONVS: tuple[Callable[..., Tensor], ...] = (functional.conv1d, functional.conv2d, functional.conv3d)
TRANSPOSED: tuple[Callable[..., Tensor], ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, generator=generator, dtype=dtype)


def layer(op: str, weight: Tensor, seed: int, dtypes: tuple[torch.dtype, torch.dtype], *window: Any) -> QnnpackLayer:
    """A product whose results fill the range of a byte; half of them have a bias, and half zero points of weights."""
    generator = seeded(seed)
    is_transposed = "transpose" in op
    groups = window[-1] if window else 1
    channels = weight.shape[1] * groups if is_transposed else weight.shape[0]
    scales = 1 if is_transposed and groups > 1 else channels
    size = weight.numel() / weight.shape[1 if is_transposed else 0]
    multiplier = (torch.rand(scales, generator=generator) + 0.2) / (80 * size**0.5)
    limits = torch.iinfo(dtypes[1])
    zero_point = int(integers(generator, dtypes[1], 1))
    return QnnpackLayer(
        op,
        weight,
        integers(generator, torch.int8, scales).long() if seed % 4 > 1 else None,
        Ending(multiplier, zero_point, limits.min, limits.max, dtypes[1]),
        torch.randint(-3000, 3000, (channels,), generator=generator, dtype=torch.int32) if seed % 2 else None,
        int(integers(generator, dtypes[0], 1)),
        dtypes[0],
        window,
    )


def expected(of: QnnpackLayer, x: Tensor) -> Tensor:
    """The same with torch's products in float64, in which sums of bytes are exact."""
    axes, ending, axis = of.levels.dim() - 2, of.ending, int(of.is_transposed)
    along = [-1, *[1] * max(axes, 0)]
    levels = of.levels.double()
    if of.zero_points is not None:
        shape = [1] * levels.dim()
        shape[axis] = -1
        levels = levels - of.zero_points.reshape(shape)
    reals = x.double() - of.x_zero_point
    if of.op == "linear":
        sums = functional.linear(reals, levels)
    elif of.is_transposed:
        stride, padding, extra, dilation, groups = of.window
        sums = TRANSPOSED[axes - 1](reals, levels, None, stride, padding, extra, groups, dilation)
    else:
        sums = CONVS[axes - 1](reals, levels, None, *of.window)
    if of.bias is not None:
        sums = sums + of.bias.reshape(along)
    steps = (sums * ending.multiplier.double().reshape(along)).round() + ending.zero_point
    return steps.clamp(ending.low, ending.high).to(ending.dtype)


def bounded(of: QnnpackLayer, bounds: str) -> QnnpackLayer:
    """A layer whose result begins at zero, as after a relu, or is cut off on both sides."""
    ending = of.ending
    found = {
        "none": ending,
        "relu": replace(ending, low=ending.zero_point),
        "clamp": replace(ending, low=ending.low + 20, high=ending.high - 100),
    }
    return replace(of, ending=found[bounds])


def steps_apart(one: Tensor, other: Tensor) -> int:
    assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return int((one.int() - other.int()).abs().max()) if one.numel() else 0


def check(kernel: Kernel, of: QnnpackLayer, x: Tensor) -> None:
    found = kernel(x)
    assert found.is_contiguous()
    assert steps_apart(found, expected(of, x)) <= 1
    for unpacked in kernel.unpack(kernel._packed).values():
        assert torch.equal(unpacked, of.levels)
    assert kernel.pair_sums is None  # full bytes by full bytes, and nothing is cut off on the way


BOUNDS = st.sampled_from(["none", "relu", "clamp"])
DTYPES = st.tuples(st.sampled_from(BYTES), st.sampled_from(BYTES))
