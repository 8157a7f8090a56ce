"""Integer lowering of ops that only move or select values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from quantc.integer.grid import Grid
from quantc.integer.lowerings.requantize import ends_of, hand_on, is_read_in_float, requantize
from quantc.integer.lowerings.value_preserving import Move
from quantc.integer.match_lowering import Bounds, NotIntegerError, Quantized, Task, tail_bounds
from quantc.integer.move_ops import MOVES
from quantc.integer.semantics import computes
from quantc.spec.aten_arithmetic import aten

SAME = "the same op on the integers; the grid stays"


@computes(*MOVES, formula=SAME)
def _move(task: Task) -> None:
    move = Move(task)
    move.finish(move.same())


@computes("pad", formula="the same op on the integers, which pads with the zero point; the grid stays")
def _pad(task: Task) -> None:
    move, mode, value = Move(task), task.argument("mode"), task.argument("value")
    if mode != "constant":
        move.finish(move.same())
        return
    if value:
        raise NotIntegerError(f"it pads with {value}, which need not lie on the grid")
    zero = float(move.source.grid.one_zero_point)  # ATen takes a float, whatever it pads
    move.finish(move.same(aten.pad.default, move.source.node, task.argument("pad"), mode, zero))


@computes(
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    formula="the same op on the bytes of the integers; the grid stays",
)
def _upsample(task: Task) -> None:
    move = Move(task)
    if move.dtype is torch.uint8:
        move.finish(move.same())
        return
    if move.dtype is not torch.int8:
        raise NotIntegerError(f"ATen repeats bytes, and {move.source.node.name} is {move.dtype}")
    # ATen repeats uint8 but not int8; the bytes are the same
    as_bytes = move.emit(aten.view.dtype, move.source.node, torch.uint8, shape=move.shape, dtype=torch.uint8)
    args = (as_bytes, task.argument("output_size"), task.argument("scale_factors"))
    repeated = move.emit(task.core.target, *args, shape=move.result_shape, dtype=torch.uint8)
    move.finish(move.same(aten.view.dtype, repeated, torch.int8), repeated)


@computes("max_pool2d", "max_pool3d", "max_pool2d_with_indices", formula=SAME)
def _max_pool(task: Task) -> None:
    move = _pool(task)
    move.finish(move.same())


@computes("max_pool1d", formula="max_pool2d of one row of the integers; the grid stays")
def _max_pool1d(task: Task) -> None:
    move = _pool(task)
    shape = move.shape
    names = ("kernel_size", "stride", "padding", "dilation")
    kernel, stride, padding, dilation = (task.argument(name)[0] if task.argument(name) else None for name in names)
    row = move.emit(aten.unsqueeze.default, move.source.node, -2, shape=(*shape[:-1], 1, shape[-1]))
    windows = ([1, kernel], [1, stride or kernel], [0, padding], [1, dilation], task.argument("ceil_mode"))
    result = move.result_shape
    pooled = move.emit(aten.max_pool2d.default, row, *windows, shape=(*result[:-1], 1, result[-1]))
    move.finish(move.same(aten.squeeze.dim, pooled, -2), pooled)


def _pool(task: Task) -> Move:
    """The input of a max pool. ATen pads with the lowest integer of the dtype, which never wins over an element."""
    move = Move(task)
    if move.source.grid.qmin > torch.iinfo(move.dtype).min and _may_be_all_padding(task):
        raise NotIntegerError("a window may hold nothing but padding, which is lower than the grid goes")
    if move.is_read_in_float and _may_be_all_padding(task):
        raise NotIntegerError("a window may hold nothing but padding, and in float that is minus infinity")
    return move


def _may_be_all_padding(task: Task) -> bool:
    return any(task.argument("padding")) and any(step > 1 for step in task.argument("dilation"))


@computes(
    *(f"aten.adaptive_max_pool{n}d.default" for n in (1, 2, 3)),
    formula="the largest integer of each window, axis by axis; the grid stays",
)
def _adaptive_max_pool(task: Task) -> None:
    """Windows differ in size: each is filled up to the longest with its last element, which changes no maximum."""
    move = Move(task)
    sizes = task.argument("output_size")
    axes = range(-len(sizes), 0)
    spans = [_windows(move.size(axis), int(size)) for axis, size in zip(axes, sizes, strict=True)]
    pooled, shape = move.source.node, list(move.shape)
    for axis, windows in zip(axes, spans, strict=True):
        index = task.keep("windows", windows.reshape(-1))
        place = len(shape) + axis
        before, after = shape[:place], shape[place + 1 :]
        picked = move.emit(aten.index_select.default, pooled, place, index, shape=(*before, windows.numel(), *after))
        split = (*before, *windows.shape, *after)
        apart = move.emit(aten.unflatten.int, picked, place, list(windows.shape), shape=split)
        shape[place] = windows.shape[0]
        pooled = move.emit(aten.amax.default, apart, [place + 1], shape=shape)
    move.finish_values(pooled)


def _windows(size: int, count: int) -> Tensor:
    """The places each of `count` windows over `size` elements covers, one row a window."""
    spans = [(place * size // count, -(-(place + 1) * size // count)) for place in range(count)]
    longest = max(end - start for start, end in spans)
    return torch.tensor([[min(start + step, end - 1) for step in range(longest)] for start, end in spans])


@computes(
    *("relu", "clamp"),
    formula="out = clamp(xq, round(low / sx) + xz, round(high / sx) + xz); on another grid, the bounds of requantize",
)
def _clamp(task: Task) -> None:
    bounds = tail_bounds(task.nodes)
    if bounds is None:
        raise NotIntegerError("its bounds are not numbers, or more than clamps follows it in the match")
    dequantize = task.argument("x")
    source, ends = task.whole(dequantize), ends_of(task, task.root)
    if is_read_in_float(task.root) and not {bounds.low, bounds.high} <= {-math.inf, 0.0, math.inf}:
        raise NotIntegerError("its result is read in float, and its bounds need not lie on the grid")
    for quantizer, grid in ends:
        task.replace(quantizer, _emit_clamp(task, source, bounds, grid))
    if task.root.users:
        made = _emit_clamp(task, source, bounds, source.grid)
        task.claim(made)
        hand_on(task, task.root, Quantized(made, source.grid), dequantize, ())


def _emit_clamp(task: Task, source: Quantized, bounds: Bounds, grid: Grid) -> fx.Node:
    if grid.equals(source.grid):
        return task.emit(aten.clamp.default, source.node, *bounds.on(grid), dtype=grid.dtype)
    return requantize(task, source, grid, bounds)
