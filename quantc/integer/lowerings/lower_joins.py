"""Integer lowering of concatenation of tensors with different grids."""

from __future__ import annotations

from typing import Any

from torch import fx

from quantc.integer.grid import Grid
from quantc.integer.lowerings.requantize import ends_of, hand_on, is_read_in_float, requantize
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.integer.semantics import computes


@computes(
    *("cat", "stack"),
    formula="the same op on the integers, each tensor first brought to the grid of the result: "
    "clamp(round((xq − xz) · sx / so) + zo), or as it is if it lies there already",
)
def _join(task: Task) -> None:
    if task.tail:
        raise NotIntegerError(f"{task.tail[0].name} follows it in the match")
    given = task.argument("xs")
    joined, ends = [task.whole(value) for value in given], ends_of(task, task.core)
    first = joined[0].grid
    if is_read_in_float(task.core) and not all(value.grid.equals(first) for value in joined):
        raise NotIntegerError("its result is read in float, and the tensors it joins lie on different grids")
    for quantizer, grid in ends:
        task.replace(quantizer, _join_values(task, joined, grid))
    if task.core.users:
        made = _join_values(task, joined, first)
        task.claim(made)
        hand_on(task, task.core, Quantized(made, first), given[0], ())


def _join_values(task: Task, values: list[Quantized], grid: Grid) -> fx.Node:
    """The integers of all, on one grid."""
    brought = [value.node if value.grid.equals(grid) else requantize(task, value, grid) for value in values]
    rest: tuple[Any, ...] = task.core.args[1:]
    made = task.emit(task.core.target, brought, *rest, dtype=grid.dtype)
    made.kwargs = {name: value for name, value in task.core.kwargs.items() if name != "tensors"}
    return made
