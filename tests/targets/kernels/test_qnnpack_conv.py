"""Int8 convolutions on QNNPACK: ordinary ones, those of rows, transposed ones, and transposed ones run as ordinary ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantc.targets.kernels.int8_conv_transpose import Spreading
from quantc.targets.kernels.qnnpack_conv import OWN_TRANSPOSED, ConvOfRows, ConvSpread, QnnpackConv
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
