"""Sums over integers for the oracle, in NumPy's int64: convolutions and windows, written out place by place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


def convolve(
    x: Ints, w: Ints, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Ints:
    """`x` is (batch, channels, …), `w` is (outputs, channels of a group, …)."""
    rank = len(stride)
    x = np.pad(x, [(0, 0), (0, 0), *((edge, edge) for edge in padding)])
    kernel = w.shape[2:]
    sizes = [(x.shape[2 + a] - dilation[a] * (kernel[a] - 1) - 1) // stride[a] + 1 for a in range(rank)]
    out = np.zeros((x.shape[0], w.shape[0], *sizes), dtype=np.int64)
    for place in product(*map(range, kernel)):
        window = tuple(_steps(place[a] * dilation[a], sizes[a], stride[a]) for a in range(rank))
        for mine, theirs in zip(_parts(w.shape[0], groups), _parts(x.shape[1], groups), strict=True):
            read: Any = (slice(None), theirs, *window)
            taken: Any = (mine, slice(None), *place)
            out[:, mine] += _mixed(x[read], w[taken])
    return out


def convolve_transposed(
    x: Ints,
    w: Ints,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Ints:
    """`x` is (batch, channels, …), `w` is (channels, outputs of a group, …): each input is spread over the output."""
    rank = len(stride)
    kernel, channels = w.shape[2:], w.shape[1] * groups
    spans = [(x.shape[2 + a] - 1) * stride[a] + dilation[a] * (kernel[a] - 1) + 1 for a in range(rank)]
    wide = [span + more for span, more in zip(spans, output_padding, strict=True)]
    out = np.zeros((x.shape[0], channels, *wide), dtype=np.int64)
    for place in product(*map(range, kernel)):
        window = tuple(_steps(place[a] * dilation[a], x.shape[2 + a], stride[a]) for a in range(rank))
        for mine, theirs in zip(_parts(channels, groups), _parts(x.shape[1], groups), strict=True):
            written: Any = (slice(None), mine, *window)
            taken: Any = (theirs, slice(None), *place)
            out[written] += _mixed(x[:, theirs], w[taken].T)
    crop = tuple(slice(padding[a], wide[a] - padding[a]) for a in range(rank))
    return out[(slice(None), slice(None), *crop)]


def _steps(start: int, count: int, step: int) -> slice:
    return slice(start, start + (count - 1) * step + 1, step)


def _parts(size: int, groups: int) -> list[slice]:
    each = size // groups
    return [slice(group * each, (group + 1) * each) for group in range(groups)]


def _mixed(x: Ints, w: Ints) -> Ints:
    """(batch, channels, …) and (outputs, channels) to (batch, outputs, …)."""
    return np.moveaxis(np.tensordot(x, w, axes=([1], [1])), -1, 1)


# -- windows -----------------------------------------------------------------------------------------------------

Window = tuple[int, int, int]
"""Where it begins and ends inside the tensor, and how many places it counts for."""


def pool_windows(
    size: int, kernel: int, stride: int, padding: int, ceil_mode: bool, count_padding: bool
) -> list[Window]:
    """The windows of a pool along one axis."""
    free = size + 2 * padding - kernel
    count = (-(-free // stride) if ceil_mode else free // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + padding:
        count -= 1  # the last would begin in the padding
    found: list[Window] = []
    for number in range(count):
        start = number * stride - padding
        end = min(start + kernel, size + padding)
        first, last = max(start, 0), min(end, size)
        found.append((first, last, end - start if count_padding else last - first))
    return found


def adaptive_windows(size: int, outputs: int) -> list[Window]:
    """The windows of an adaptive pool along one axis."""
    ends = [(number * size // outputs, -(-(number + 1) * size // outputs)) for number in range(outputs)]
    return [(first, last, last - first) for first, last in ends]


def sum_windows(x: Ints, windows: Sequence[Sequence[Window]]) -> tuple[Ints, Ints]:
    """The sums over windows on the last axes, and how many places each counts for."""
    rank = len(windows)
    shape = tuple(map(len, windows))
    sums = np.zeros((*x.shape[:-rank], *shape), dtype=np.int64)
    counts = np.zeros(shape, dtype=np.int64)
    for place in np.ndindex(*shape):
        chosen = [windows[axis][number] for axis, number in enumerate(place)]
        inside: Any = (..., *(slice(first, last) for first, last, _ in chosen))
        sums[(..., *place)] = x[inside].sum(axis=tuple(range(-rank, 0)))
        counts[place] = np.prod([counted for *_, counted in chosen])
    return sums, counts


def spread(value: Any, rank: int) -> list[int]:
    """An argument that may be one number, or a list of one, as one number for each axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values
