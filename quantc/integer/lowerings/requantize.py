"""Propagation of integers: requantized for quantize users, dequantized for float users."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from quantc.integer.grid import Grid
from quantc.integer.library import OPS
from quantc.integer.match_lowering import Bounds, Quantized, Task
from quantc.ir.types import TensorType, tensor_type
from quantc.qdq.ops import is_quantize

End = tuple[fx.Node, Grid]
"""A node that quantizes, and the grid it quantizes to."""


def ends_of(task: Task, value: fx.Node) -> list[End]:
    """Quantize users of a value, with their grids; NotIntegerError if a grid is unknown."""
    return [(user, task.grid(user)) for user in value.users if is_quantize(user)]


def is_read_in_float(value: fx.Node) -> bool:
    """True if a value has a user other than quantize ops."""
    return not all(is_quantize(user) for user in value.users)


def hand_on(task: Task, old: fx.Node, made: Quantized, dequantize: fx.Node, ends: Sequence[End]) -> None:
    """Replace the float value `old` by the integers of `made`.

    Quantize ops on the same grid are removed, others become requantize ops. Float users get the integers dequantized
    like `dequantize`, an op on the same grid: dequantizing moved integers and moving dequantized floats give the same
    bits.
    """
    for quantizer, grid in ends:
        task.stand_in(quantizer, made.node if grid.equals(made.grid) else requantize(task, made, grid))
    if not old.users:
        return
    read = task.program.emit(
        dequantize.target,
        (made.node, *dequantize.args[1:]),
        before=task.root,
        like=old,
        value=_with_dtype(made.node, torch.float32),
    )
    task.stand_in(old, read)
    task.program.plan.claims.drop(read)  # claims are for ops that compute; this only dequantizes


def requantize(task: Task, value: Quantized, grid: Grid, bounds: Bounds | None = None) -> fx.Node:
    """Integers requantized onto another grid, within bounds."""
    args = (value.node, value.grid.one_zero_point, *task.onto(grid, value.grid.scale / grid.scale, bounds))
    kind = _with_dtype(value.node, grid.dtype)
    return task.program.emit(OPS["requantize"].target, args, before=task.root, like=task.root, value=kind)


def _with_dtype(node: fx.Node, dtype: torch.dtype) -> TensorType | None:
    kind = tensor_type(node)
    return None if kind is None else TensorType(dtype, kind.shape)
