"""Int8 convolutions on QNNPACK: ordinary ones, those of rows, transposed ones, and transposed ones run as ordinary ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.errors import InputError
from quantc.targets.kernels.int8_conv_transpose import Spreading
from quantc.targets.kernels.kernel_table import Call, NoKernelError
from quantc.targets.kernels.qnnpack_conv import (
    OWN_TRANSPOSED,
    ConvOfRows,
    ConvSpread,
    QnnpackConv,
    conv,
    conv_of_rows,
    conv_spread,
    conv_transpose,
)
from tests.support.byte_convs import FULL, Layer, close
from tests.support.qnnpack_layers import BOUNDS, DTYPES, bounded, check, integers, layer, seeded


@settings(max_examples=150)
@given(
    axes=st.integers(1, 3),
    read=st.integers(1, 9),
    made=st.integers(1, 9),
    groups=st.sampled_from([1, 1, 2, 3, 16]),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    batch=st.sampled_from([None, 0, 1, 3]),
    dtypes=DTYPES,
    bounds=BOUNDS,
    seed=st.integers(0, 99),
)
def test_convolutions(
    axes: int,
    read: int,
    made: int,
    groups: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    batch: int | None,
    dtypes: Any,
    bounds: str,
    seed: int,
) -> None:
    size = (12, 10, 7)[axes - 1]
    size = max(size, dilation * (kernel - 1) + 1 - 2 * padding)
    if groups == 16:  # depthwise, for which there are kernels of their own
        read = made = 1
    generator = seeded(seed)
    weight = integers(generator, torch.int8, made * groups, read, *[kernel] * axes)
    window = ([stride] * axes, [padding] * axes, [dilation] * axes, groups)
    of = bounded(layer(f"conv{axes}d", weight, seed, dtypes, *window), bounds)
    x = integers(generator, dtypes[0], *([] if batch is None else [batch]), read * groups, *[size] * axes)
    check(QnnpackConv(of), of, x)


@settings(max_examples=100)
@given(
    axes=st.integers(1, 3),
    read=st.integers(1, 5),
    made=st.integers(1, 5),
    groups=st.integers(1, 3),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 1),
    extra=st.integers(0, 1),
    dilation=st.integers(1, 2),
    dtypes=DTYPES,
    bounds=BOUNDS,
    seed=st.integers(0, 99),
)
def test_transposed_convolutions(
    axes: int,
    read: int,
    made: int,
    groups: int,
    kernel: int,
    stride: int,
    padding: int,
    extra: int,
    dilation: int,
    dtypes: Any,
    bounds: str,
    seed: int,
) -> None:
    extra = min(extra, max(stride, dilation) - 1)
    generator = seeded(seed)
    weight = integers(generator, torch.int8, read * groups, made, *[kernel] * axes)
    window: Any = ([stride] * axes, [padding] * axes, [extra] * axes, [dilation] * axes, groups)
    of = bounded(layer(f"conv_transpose{axes}d", weight, seed, dtypes, *window), bounds)
    x = integers(generator, dtypes[0], 2, read * groups, *[5] * axes)
    if axes in OWN_TRANSPOSED:
        check(QnnpackConv(of), of, x)
    of = replace(of, zero_points=None)
    spreading = Spreading(
        taps=tuple(weight.shape[2:]),
        stride=tuple(window[0]),
        padding=tuple(window[1]),
        output_padding=tuple(window[2]),
        dilation=tuple(window[3]),
        groups=groups,
        inputs=read,
        outputs=made,
    )
    check(ConvSpread(of, spreading), of, x)


@settings(max_examples=60)
@given(
    read=st.integers(1, 4),
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 7)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 3)),
    down=st.integers(1, 2),
    batch=st.sampled_from([None, 0, 1, 2]),
    dtypes=DTYPES,
    bounds=BOUNDS,
    seed=st.integers(0, 99),
)
def test_rows_of_windows_as_channels(
    read: int, kernel: Any, stride: Any, padding: Any, down: int, batch: int | None, dtypes: Any, bounds: str, seed: int
) -> None:
    generator = seeded(seed)
    weight = integers(generator, torch.int8, 5, read, *kernel)
    window = (list(stride), list(padding), [down, 1], 1)
    of = bounded(layer("conv2d", weight, seed, dtypes, *window), bounds)
    x = integers(generator, dtypes[0], *([] if batch is None else [batch]), read, 9, 11)
    check(ConvOfRows(of), of, x)


UNSIGNED = (torch.uint8, torch.uint8)


def test_channels_are_counted_since_the_kernels_do_not() -> None:
    generator = seeded(0)
    conv = QnnpackConv(layer("conv1d", integers(generator, torch.int8, 4, 8, 3), 0, UNSIGNED, [1], [0], [1], 1))
    for shape in ((2, 7, 9), (8,), (1, 2, 8, 9)):
        with pytest.raises(InputError, match="1 axes of 8 channels"):
            conv(integers(generator, torch.uint8, *shape))


def call(shape: tuple[int, ...], groups: int = 1, op: str = "conv", **more: Any) -> Call:
    axes = len(shape) - 2
    stride: int = more.pop("stride", 1)
    extra = [[0] * axes] if op == "conv_transpose" else []
    behind = (groups, [1] * axes) if extra else ([1] * axes, groups)
    of = Layer(op, shape, ([stride] * axes, [0] * axes, *extra, *behind), FULL, **more)
    channels = shape[0] if extra else shape[1] * groups
    return of.call(of.input(1, channels, *[9] * axes))


@pytest.mark.parametrize(
    ("shape", "pays"),
    [
        ((32, 3, 7, 7), True),
        ((32, 1, 3, 3), True),
        ((32, 8, 3, 3), False),
        ((31, 3, 7, 7), False),
        ((32, 3, 7, 1), False),
        ((32, 3, 7), False),
    ],
    ids=str,
)
def test_windows_are_taken_by_rows_where_they_are_wide_and_channels_few(shape: tuple[int, ...], pays: bool) -> None:
    if pays:
        assert isinstance(conv_of_rows(call(shape)), ConvOfRows)
    else:
        with pytest.raises(NoKernelError, match="by rows"):
            conv_of_rows(call(shape))
    assert type(conv(call(shape))) is QnnpackConv


@pytest.mark.parametrize("groups", [1, 2])
def test_makers_read_the_window_of_a_call(groups: int) -> None:
    of = Layer("conv", (4, 3, 3, 2), ([2, 1], [1, 0], [1, 2], groups), FULL, zero_points=20)
    x = of.input(2, 3 * groups, 8, 9)
    close(conv(of.call(x))(x), of.expected(x), "QNNPACK conv")  # type: ignore[operator]


@pytest.mark.parametrize("groups", [1, 2])
def test_makers_read_the_window_of_a_transposed_call(groups: int) -> None:
    of = Layer("conv_transpose", (4, 3, 3, 2), ([2, 3], [1, 0], [1, 0], groups, [1, 1]), FULL)
    x = of.input(2, 4, 4, 5)
    for maker in (conv_spread, conv_transpose):
        close(maker(of.call(x))(x), of.expected(x), maker.__name__)  # type: ignore[operator]


def test_transposed_convolutions_are_spread_only_where_that_is_right_and_of_use() -> None:
    with pytest.raises(NoKernelError, match="stride of 1"):
        conv_spread(call((4, 3, 3, 3), op="conv_transpose"))
    with pytest.raises(NoKernelError, match="zeros between their taps"):
        conv_spread(call((4, 3, 3, 3), op="conv_transpose", stride=2, zero_points=20))
    with pytest.raises(NoKernelError, match="over three axes are wrong"):
        conv_transpose(call((4, 3, 2, 2, 2), op="conv_transpose", stride=2))


def test_the_work_is_named_by_what_the_op_is() -> None:
    x = torch.empty(2, 4, 8, 8, device="meta")
    assert str(conv(call((6, 4, 3, 3))).work(x)) == "conv2d 3x3 s1, 72 × 4→6"  # type: ignore[union-attr]
    spread = conv_spread(call((4, 6, 2, 2), op="conv_transpose", stride=2))
    assert str(spread.work(x)) == "conv_transpose2d 2x2 s2, 512 × 4→6"  # type: ignore[union-attr]
