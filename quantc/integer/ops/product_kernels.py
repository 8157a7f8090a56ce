"""Integer GEMMs and convolutions on floating-point kernels: far faster than integer ones, with the same bits.

A sum of integer products is exact in float32 as long as no partial sum can reach 2^24, in any order, and in float64 up
to 2^53. `parts` is the number of parts the input channels must be split into for float32; 0 selects float64. Three
hazards are excluded:

- Winograd and FFT algorithms multiply other numbers than the factors. So float32 convolutions name their kernel, oneDNN's direct one on x86,
  instead of leaving the choice to torch, which may be NNPACK; elsewhere they use float64, for which torch has none of these.
- If the user allows it, torch rounds factors of float32 matmuls to bfloat16 or TF32. Those represent integers up to 256, so factors in
  float32 are limited to that: see `FLOAT32_FACTOR`.
- Sums of zeros can be -0.0: 0.0 is added to float results.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quantc.integer.proof.bounds import parts_of
from quantc.spec.arithmetic import Rounding
from quantc.spec.aten_arithmetic import rescale

FLOAT32_FACTOR = 256
"""The largest factor for which `parts` may be other than 0: bfloat16 holds all integers up to it."""
BLOCK = 65536
"""Accumulators rescaled at once: in float64 they stay in the L2 cache."""


def linear(
    x: Tensor,
    x_zero_point: int,
    w: Tensor,
    w_zero_point: Tensor | None,
    bias: Tensor | None,
    parts: int,
    *out: Any,
) -> Tensor:
    """`products.linear`."""
    dtype = _working_type(x, parts)
    left, right = _minus(x, x_zero_point, dtype), _weight(w, w_zero_point, 0, dtype)
    sums = [left[..., a:b] @ right[:, a:b].t() for a, b in parts_of(x.shape[-1], parts)]
    return _finish(sums, bias, 0, *out)


def matmul(
    x: Tensor,
    x_zero_point: int,
    y: Tensor,
    y_zero_point: Tensor | None,
    bias: Tensor | None,
    parts: int,
    *out: Any,
) -> Tensor:
    """`products.matmul`."""
    dtype = _working_type(x, parts)
    left, right = _minus(x, x_zero_point, dtype), _weight(y, y_zero_point, y.dim() - 1, dtype)
    rows = (slice(None),) if y.dim() > 1 else ()
    sums = [left[..., a:b] @ right[..., a:b, *rows] for a, b in parts_of(x.shape[-1], parts)]
    return _finish(sums, bias, 0, *out)


def conv(
    x: Tensor,
    x_zero_point: int,
    w: Tensor,
    w_zero_point: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    parts: int,
    *out: Any,
) -> Tensor:
    """`products.conv`."""
    dtype, rank = _convolution_type(x, parts), len(stride)
    left, right = _minus(x, x_zero_point, dtype), _weight(w, w_zero_point, 0, dtype)
    batch = left if x.dim() == rank + 2 else left.unsqueeze(0)
    direct = _direct if dtype is torch.float32 else _torch_convolution
    sums = [
        direct(_channels(batch, 1, a, b, groups), right[:, a:b], stride, padding, dilation, groups)
        for a, b in parts_of(w.shape[1], parts)
    ]
    return _finish(_like_input(sums, x, rank), bias, rank, *out)


def conv_transpose(
    x: Tensor,
    x_zero_point: int,
    w: Tensor,
    w_zero_point: Tensor | None,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    parts: int,
    *out: Any,
) -> Tensor:
    """`products.conv_transpose`. torch has direct algorithms only for it."""
    dtype, rank = _convolution_type(x, parts), len(stride)
    left, right = _minus(x, x_zero_point, dtype), _weight(w, w_zero_point, 1, dtype)
    batch = left if x.dim() == rank + 2 else left.unsqueeze(0)
    window = (stride, padding, dilation, True, output_padding, groups)
    sums = [
        torch.convolution(_channels(batch, 1, a, b, groups), _channels(right, 0, a, b, groups), None, *window)
        for a, b in parts_of(w.shape[0] // groups, parts)
    ]
    return _finish(_like_input(sums, x, rank), bias, rank, *out)


# -- factors -------------------------------------------------------------------------------------------------------


def _working_type(x: Tensor, parts: int) -> torch.dtype:
    return torch.float32 if parts and x.device.type == "cpu" else torch.float64


def _convolution_type(x: Tensor, parts: int) -> torch.dtype:
    has_direct = torch._C._has_mkldnn and platform.machine() in ("x86_64", "AMD64")
    return _working_type(x, parts) if has_direct and x.numel() else torch.float64


def _minus(x: Tensor, zero_point: int | Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x - zero_point`."""
    return _less(x.to(dtype), zero_point)


def _weight(w: Tensor, zero_point: Tensor | None, axis: int, dtype: torch.dtype) -> Tensor:
    """`w - zero_point`, one for all or one for each index of an axis. Valid until the next call."""
    if zero_point is not None and zero_point.dim():
        zero_point = zero_point.reshape([-1 if dim == axis else 1 for dim in range(w.dim())])
    return _less(_ROOM.holding(w, dtype), zero_point)


def _less(wide: Tensor, zero_point: int | Tensor | None) -> Tensor:
    if zero_point is None or (isinstance(zero_point, int) and zero_point == 0):
        return wide
    return wide.sub_(zero_point)


class _Room(threading.local):
    """Memory for one weight in floating point, kept from call to call: to be given new pages costs more than to fill
    them. It holds no numbers that are read twice, so nothing in it can be out of date."""

    LIMIT = 2**24
    """In elements. Larger weights get memory of their own."""

    def __init__(self) -> None:
        self.kept = torch.empty(0)

    def holding(self, w: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of a weight."""
        if dtype is not torch.float32 or w.numel() > self.LIMIT:
            return w.to(dtype)
        if self.kept.numel() < w.numel():
            with torch.inference_mode(False):
                self.kept = torch.empty(w.numel())
        return self.kept[: w.numel()].view(w.shape).copy_(w)


_ROOM = _Room()


def _channels(x: Tensor, axis: int, start: int, end: int, groups: int) -> Tensor:
    """Some of the channels of each group."""
    size = x.shape[axis] // groups
    if end - start == size:
        return x
    by_group = x.reshape([*x.shape[:axis], groups, size, *x.shape[axis + 1 :]])
    return by_group.narrow(axis + 1, start, end - start).flatten(axis, axis + 1)


# -- convolutions --------------------------------------------------------------------------------------------------


def _direct(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """oneDNN's direct convolution; over one axis it is one over two, the first of them of size 1."""
    if len(stride) > 1:
        return torch.mkldnn_convolution(x, w, None, padding, stride, dilation, groups)
    window = ([0, *padding], [1, *stride], [1, *dilation], groups)
    return torch.mkldnn_convolution(x.unsqueeze(2), w.unsqueeze(2), None, *window).squeeze(2)


def _torch_convolution(
    x: Tensor, w: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    return torch.convolution(x, w, None, stride, padding, dilation, False, [0] * len(stride), groups)


def _like_input(sums: list[Tensor], x: Tensor, rank: int) -> list[Tensor]:
    """Without the batch axis if the input had none."""
    return sums if x.dim() == rank + 2 else [item.squeeze(0) for item in sums]


# -- results -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Out:
    """The last arguments of a product, its bias among them: what takes sums to a result."""

    bias: Tensor | None
    multiplier: Tensor | None
    shift: Tensor | None
    zero_point: int
    qmin: int
    qmax: int
    dtype: torch.dtype
    rounding: Rounding = "half-even"
    saturate: bool = True

    def for_channels(self, count: int, trailing: int) -> _Out:
        """Biases and multipliers shaped to go with channels and one axis after them."""
        given = (self.bias, self.multiplier, self.shift)
        bias, multiplier, shift = (_by_channel(item, count, trailing) for item in given)
        return replace(self, bias=bias, multiplier=multiplier, shift=shift)

    def of(self, channels: slice) -> _Out:
        """For some of the channels."""
        given = (self.bias, self.multiplier, self.shift)
        bias, multiplier, shift = (item if item is None or not item.dim() else item[channels] for item in given)
        return replace(self, bias=bias, multiplier=multiplier, shift=shift)

    def write(self, total: Tensor, result: Tensor) -> None:
        """Write the result of sums, given in float64, which are used up."""
        is_float = self.dtype.is_floating_point
        if self.bias is not None or is_float:
            total.add_(0.0 if self.bias is None else self.bias)  # -0.0 becomes 0.0, as for integers
        if self.multiplier is None:
            result.copy_(total)
        elif is_float:
            result.copy_(total.mul_(self.multiplier))
        elif self.shift is not None or self.rounding != "half-even" or not self.saturate:
            grid = (self.zero_point, self.qmin, self.qmax, self.dtype, self.rounding, self.saturate)
            result.copy_(rescale(total.to(torch.int64), self.multiplier, self.shift, *grid))
        else:
            levels = (
                total.mul_(self.multiplier).round_().clamp_(self.qmin - self.zero_point, self.qmax - self.zero_point)
            )
            # by way of int32: torch is slow in making bytes of floats
            result.copy_(levels.to(torch.int32).add_(self.zero_point))


def _finish(sums: list[Tensor], bias: Tensor | None, trailing: int, *out: Any) -> Tensor:
    """The sum of the parts with the bias, on the grid of the result: block by block, so as to stay in the cache.

    `trailing` axes come after that of the channels; along the channels there may be biases and multipliers.
    """
    shape = sums[0].shape
    axis = max(len(shape) - trailing - 1, 0)
    size = (math.prod(shape[:axis]), math.prod(shape[axis : axis + 1]), math.prod(shape[axis + 1 :]))
    terms = [item.reshape(size) for item in sums]
    whole = _Out(bias, *out).for_channels(size[1], trailing)
    result = torch.empty(size, dtype=whole.dtype, device=terms[0].device)
    room = torch.empty(min(BLOCK, result.numel()), dtype=torch.float64, device=result.device)
    for block in _blocks(*size):
        here = result[block]
        total = room[: here.numel()].view(here.shape).copy_(terms[0][block])
        for term in terms[1:]:
            total.add_(term[block])
        whole.of(block[1]).write(total, here)
    return result.view(shape)


def _by_channel(values: Tensor | None, channels: int, trailing: int) -> Tensor | None:
    """Numbers that go with the axis of the channels, and one axis after it; or one number for all."""
    if values is None or values.numel() == 1:
        return None if values is None else values.reshape(())
    if values.numel() != channels or values.shape[-1 if values.dim() == 1 else -1 - trailing] != channels:
        raise ValueError(f"{list(values.shape)} numbers do not go with {channels} channels")
    return values.reshape(channels, 1)


def _blocks(count: int, channels: int, length: int) -> Iterator[tuple[slice, slice, slice]]:
    """Ranges of the blocks of `[count, channels, length]` elements, each of at most `BLOCK` elements."""
    across = max(1, min(length, BLOCK))
    down = max(1, min(channels, BLOCK // across))
    deep = max(1, BLOCK // (across * down))
    for item in range(0, count, deep):
        for channel in range(0, channels, down):
            for start in range(0, length, across):
                yield slice(item, item + deep), slice(channel, channel + down), slice(start, start + across)
