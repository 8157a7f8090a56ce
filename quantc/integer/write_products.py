"""How products are written on integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantc.integer.grid import Grid
from quantc.integer.library import OPS
from quantc.integer.products import ACCUMULATOR
from quantc.integer.rescaling import REQUANTIZED
from quantc.integer.semantics import computes
from quantc.integer.task import NotIntegerError, Quantized, Task, tail_bounds
from quantc.numerics import quantize_bias

FORMULA = f"{ACCUMULATOR}; {REQUANTIZED.replace('(xq − xz)', 'acc').replace('sx / so', 'sx·sw / so')}"


@computes("linear", formula=FORMULA)
def _linear(task: Task) -> None:
    x, w = task.whole(task.argument("x")), _weight(task, axis=0)
    bias = _bias(task, x, w)
    head = (x.node, x.grid.one_zero_point, w.node, _zero_points(task, w.grid), bias, 0)
    finish(task, OPS["linear"].target, head, _product_scale(x.grid, w.grid, 0))


@computes("conv1d", "conv2d", "conv3d", formula=FORMULA)
def _conv(task: Task) -> None:
    x, w = task.whole(task.argument("x")), _weight(task, axis=0)
    bias = _bias(task, x, w)
    rank = w.node.meta["val"].rank - 2
    windows = [_spread(task.argument(name), rank) for name in ("stride", "padding", "dilation")]
    head = (
        x.node,
        x.grid.one_zero_point,
        w.node,
        _zero_points(task, w.grid),
        bias,
        *windows,
        task.argument("groups"),
        0,
    )
    finish(task, OPS["conv"].target, head, _product_scale(x.grid, w.grid, rank))


def finish(task: Task, target: Any, head: tuple[Any, ...], scale: Tensor) -> None:
    """Write a product with what follows it; `scale` is that of its accumulator, shaped to go with it.

    A tail that only clamps becomes the bounds of the rounding. Any other is left in float, after a product that
    yields float.
    """
    bounds, quantizers = tail_bounds(task.tail), task.quantizers()
    if bounds is None or not quantizers:
        made = task.emit(target, *head, *task.to_float(scale), dtype=torch.float32, like=task.core)
        task.replace(task.core, made)
        return
    for quantizer in quantizers:
        grid = task.grid(quantizer)
        made = task.emit(target, *head, *task.onto(grid, scale / grid.scale, bounds), dtype=grid.dtype)
        task.replace(quantizer, made)


def _weight(task: Task, axis: int) -> Quantized:
    weight = task.quantized(task.argument("w"))
    if weight.grid.axis not in (None, axis):
        raise NotIntegerError(f"the weight's scales lie along axis {weight.grid.axis}, not along the output channels")
    return weight


def _bias(task: Task, x: Quantized, w: Quantized) -> Any:
    node = task.argument("b")
    if node is None:
        return None
    bias = task.constant(node)
    if bias is None:
        raise NotIntegerError(f"the bias {node.name} is not a constant")
    where = task.program.describe(node)
    return task.keep("bias", quantize_bias(bias.detach(), x.grid.scale, w.grid.scale, where=where))


def _zero_points(task: Task, grid: Grid) -> Any:
    return task.keep("weight_zero_point", grid.zero_point) if bool(grid.zero_point.any()) else None


def _product_scale(x: Grid, w: Grid, trailing: int) -> Tensor:
    """The scale of the accumulator; with a weight per channel, `trailing` axes come after the channels."""
    product = x.scale * w.scale
    return product if w.is_whole else product.reshape(-1, *[1] * trailing)


def _spread(value: Any, rank: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * rank if len(values) == 1 else values
