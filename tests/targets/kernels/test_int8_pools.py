"""Pools of bytes: the largest and the average of windows, and larger images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from quantc.integer.lowerings.lower_reductions import windows_along
from quantc.targets.kernels.float_epilogue import Ending
from quantc.targets.kernels.int8_pools import (
    AdaptivePool,
    AveragePool,
    MaxPool3d,
    Repeat,
    max_pool,
    to_channels_last,
    upsample,
)
from quantc.targets.kernels.kernel_table import NoKernelError
from tests.support.kernel_calls import (
    FLOAT,
    by_odd_strides,
    by_odd_strides_last,
    call_of,
    check,
    dtypes,
    grids,
    kernels_of,
    levels,
    lying_channels_last,
    scales,
    seeds,
    strided,
    zero_points,
)


@st.composite
def pools(draw: Any, min_rank: int = 1) -> tuple[Any, ...]:
    rank = draw(st.integers(min_rank, 3))
    sizes = tuple(draw(st.integers(3, 9)) for _ in range(rank))
    if draw(st.booleans()):
        sizes = (1, *sizes[1:])
    leading = draw(st.sampled_from([(2, 3), (1, 40), (1, 1), (3,)]))
    kernel = [draw(st.integers(1, min(3, size))) for size in sizes]
    stride = [draw(st.integers(1, 3)) for _ in range(rank)]
    padding = [draw(st.integers(0, size // 2)) for size in kernel]
    return (*leading, *sizes), kernel, stride, padding, draw(st.booleans()), draw(st.booleans())


@settings(max_examples=80)
@given(pool=pools(), out=st.one_of(grids(), st.just(FLOAT)), dtype=dtypes, zero=zero_points, scale=scales, seed=seeds)
def test_averages_of_windows(pool: Any, out: Any, dtype: Any, zero: int, scale: float, seed: int) -> None:
    shape, kernel, stride, padding, ceil, count_padding = pool
    sizes = shape[-len(kernel) :]
    rows = zip(sizes, kernel, stride, padding, strict=True)
    axes = [windows_along(*row, ceil, count_padding) for row in rows]
    edges = [edge for axis in axes for edge in (axis.before, axis.after)]
    counts = torch.ones((), dtype=torch.float64)
    for axis in axes:
        counts = counts.unsqueeze(-1) * torch.tensor(axis.counts)
    multiplier = scale / (counts.flatten()[0] if counts.numel() == 1 else counts)
    check("sum_windows", levels(shape, dtype, "any", seed), zero, kernel, stride, edges, multiplier, None, *out)


@settings(max_examples=50)
@given(
    leading=st.sampled_from([(2, 3), (1, 40), (1, 1)]), sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(2, 5)),
    min_size=1, max_size=3), out=st.one_of(grids(), st.just(FLOAT)), zero=zero_points, scale=scales, seed=seeds,
)  # fmt: skip
def test_averages_of_spans(leading: Any, sizes: Any, out: Any, zero: int, scale: float, seed: int) -> None:
    spans = [[(n * size // out, -(-(n + 1) * size // out)) for n in range(out)] for size, out in sizes]
    starts, ends = ([torch.tensor([span[at] for span in axis]) for axis in spans] for at in (0, 1))
    counts = torch.ones((), dtype=torch.float64)
    for start, end in zip(starts, ends, strict=True):
        counts = counts.unsqueeze(-1) * (end - start)
    x = levels((*leading, *(size for size, _ in sizes)), torch.uint8, "any", seed)
    check("sum_spans", x, zero, starts, ends, scale / counts, None, *out)


def test_spans_that_are_no_adaptive_pool_are_refused() -> None:
    x = levels((1, 2, 8), torch.uint8, "any", 0)
    starts, ends = [torch.tensor([0, 1])], [torch.tensor([4, 8])]
    grid = (0, 0, 255, torch.uint8)
    assert kernels_of("sum_spans", x, 0, starts, ends, torch.tensor([0.25, 1 / 7]).double(), None, *grid)[0] == []


@settings(max_examples=60)
@given(pool=pools(min_rank=2), dtype=dtypes, dilation=st.integers(1, 2), seed=seeds)
def test_largest_of_windows(pool: Any, dtype: Any, dilation: int, seed: int) -> None:
    shape, kernel, stride, padding, ceil, _ = pool
    rank = len(kernel)
    if any((k - 1) * dilation >= size for k, size in zip(kernel, shape[-rank:], strict=True)):
        dilation = 1
    x = levels(shape, dtype, "any", seed)
    (kernel_, inputs), *_ = kernels_of(f"max_pool{rank}d", x, kernel, stride, padding, [dilation] * rank, ceil)[0]
    pool_of_floats: Any = (functional.max_pool2d, functional.max_pool3d)[rank - 2]
    expected = pool_of_floats(x.double(), kernel, stride, padding, dilation, ceil)
    lowest = torch.iinfo(dtype).min
    expected = expected.clamp(min=lowest)  # windows that are all padding
    for lay in (lambda x: x, lying_channels_last, strided, by_odd_strides, by_odd_strides_last):
        for in_order in (True, False):
            kernel_.in_order = in_order
            assert torch.equal(kernel_(lay(inputs[0])).double(), expected)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 40, 3, 3), (1, 1, 1, 1), (1, 40, 2, 3, 4)])
def test_larger_images(shape: tuple[int, ...]) -> None:
    x = levels(shape, torch.uint8, "any", 0)
    axes = len(shape) - 2
    assert check(f"upsample_nearest{axes}d", x, None, [2.0] * axes) == ["upsample_nearest, channels last"]


# -- the kernels themselves, against torch's pools of floats ---------------------------------------------------------------

GRID = Ending(torch.ones(1), 4, 0, 255, torch.uint8)
REAL = Ending(torch.ones(1), 0, 0, 0, torch.float32)


def images(*shape: int) -> Tensor:
    return levels(shape, torch.uint8, "any", 0)


def test_volumes_are_pooled_as_images_and_along_the_depth() -> None:
    x = images(2, 3, 5, 6, 4)
    window: Any = ([2, 3, 2], [1, 2, 2], [1, 1, 0], [1, 1, 2], False)
    expected = functional.max_pool3d(x.double(), *window)
    assert torch.equal(MaxPool3d(*window)(x).double(), expected)
    assert torch.equal(MaxPool3d(*window)(x[0]).double(), expected[0])


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("edges", ["none", "even", "one side"])
def test_averages_are_those_of_float64(axes: int, edges: str) -> None:
    x = images(2, 3, *[6] * axes)
    before, after = {"none": (0, 0), "even": (1, 1), "one side": (0, 1)}[edges]
    window: Any = ([2] * axes, [2] * axes, [before, after] * axes)
    padded = functional.pad(x.double() - 9, [before, after] * axes)
    pool: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[axes - 1]
    means = pool(padded, 2, 2)
    factor = torch.tensor(0.5**axes)
    torch.testing.assert_close(AveragePool(9, window, factor, REAL)(x), means.float())
    made = AveragePool(9, window, factor, GRID)(x)
    assert float((made - (means.round() + 4).clamp(0, 255)).abs().max()) <= 1


@pytest.mark.parametrize("outputs", [[3], [2, 4], [1, 2, 3]], ids=str)
def test_adaptive_averages_are_those_of_float64(outputs: list[int]) -> None:
    axes = len(outputs)
    x = images(2, 3, *[5] * axes)
    pool: Any = (
        functional.adaptive_avg_pool1d,
        functional.adaptive_avg_pool2d,
        functional.adaptive_avg_pool3d,
    )[axes - 1]
    means = pool(x.double() - 9, outputs if axes > 1 else outputs[0]) * 0.5
    torch.testing.assert_close(AdaptivePool(9, outputs, 0.5, REAL)(x), means.float())


def test_images_become_larger_by_repetition() -> None:
    x = images(1, 40, 2, 3)
    found = Repeat(2, None, [2.0, 3.0])(x)
    assert torch.equal(found, x.repeat_interleave(2, 2).repeat_interleave(3, 3))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((2, 40, 3, 4), (480, 1, 160, 40)), ((1, 40, 1, 4), (160, 1, 160, 40)), ((1, 64, 1, 1), (64, 1, 64, 64))],
    ids=str,
)
def test_images_of_many_channels_are_turned_and_have_the_strides_of_that_order(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    x = images(*shape)
    assert to_channels_last(x).stride() == strides
    assert torch.equal(to_channels_last(x), x)


def test_images_of_few_channels_stay_as_they_lie() -> None:
    x = images(2, 3, 4, 5)
    assert to_channels_last(x) is x
    last = x.to(memory_format=torch.channels_last)
    assert to_channels_last(last).stride() == last.stride()


def test_what_is_no_byte_or_of_a_size_that_is_computed_is_refused() -> None:
    call, _ = call_of("max_pool2d", torch.ones(1, 1, 4, 4), [2, 2])
    with pytest.raises(NoKernelError, match="for bytes"):
        max_pool(call)
    call, _ = call_of("upsample_nearest2d", levels((1, 1, 4, 4), torch.int8, "any", 0).float(), None, [2.0, 2.0])
    with pytest.raises(NoKernelError, match="for uint8"):
        upsample(call)
