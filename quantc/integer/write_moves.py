"""How ops that only move values, or choose among them, are written on integers: the same op, on the integers."""

from __future__ import annotations

from torch import fx
from torch.fx.node import map_arg

from quantc.integer.library import OPS
from quantc.integer.semantics import computes
from quantc.integer.task import NotIntegerError, Task
from quantc.qdq import is_dequantize

MOVES = (
    *("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "aten.squeeze.default", "aten.squeeze.dims"),
    *("transpose", "permute", "expand", "repeat", "aten.repeat_interleave.self_int", "slice", "select", "narrow"),
    *("index", "index_select", "gather", "flip", "roll", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *("contiguous", "clone", "detach", "max_pool1d", "max_pool2d", "max_pool3d", "amax", "amin"),
)


@computes(*MOVES, formula="the same op on the integers; the grid stays")
def _move(task: Task) -> None:
    if task.tail:
        raise NotIntegerError("something follows it in the match")
    source = task.whole(task.argument("x"))
    quantizers = task.quantizers()
    if not quantizers:
        raise NotIntegerError("its result is read in float")

    def at(value: fx.Node) -> fx.Node:
        return source.node if is_dequantize(value) and value.args[0] is source.node else value

    core = task.core
    args, kwargs = map_arg((core.args, core.kwargs), at)
    moved = task.emit(core.target, *args, dtype=source.grid.dtype)
    moved.kwargs = kwargs
    for quantizer in quantizers:
        grid = task.grid(quantizer)
        result = moved
        if not grid.equals(source.grid):
            head = (moved, source.grid.one_zero_point)
            rest = task.onto(grid, source.grid.scale / grid.scale)
            result = task.emit(OPS["requantize"].target, *head, *rest, dtype=grid.dtype)
        task.replace(quantizer, result)
