"""Products of what is quantized as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quantc import run_time
from quantc.formats import Timing
from quantc.integer.library import OPS
from quantc.integer.ops.dynamic import DYNAMIC
from quantc.integer.semantics import computes
from quantc.integer.task import NotIntegerError, Quantized, Task
from quantc.qdq import is_choice, is_dequantize


@dataclass(frozen=True)
class RunTime:
    """An operand that is quantized as it comes: the float tensor, and how its scale is found."""

    node: fx.Node
    per_token: bool
    zero_point: int | None
    """Where the grid is symmetric about; None if it is affine."""
    qmin: int
    qmax: int
    dtype: torch.dtype
    eps: float

    @property
    def grid(self) -> tuple[Any, ...]:
        """The last arguments of the ops that quantize what they read."""
        return self.per_token, self.zero_point, self.qmin, self.qmax, self.dtype, self.eps


def run_time_operand(value: Any) -> RunTime:
    """An operand that must come with scales found as the program runs."""
    levels = value.args[0] if isinstance(value, fx.Node) and is_dequantize(value) else None
    scale = levels.args[1] if isinstance(levels, fx.Node) and len(levels.args) > 1 else None
    choice = scale.args[0] if isinstance(scale, fx.Node) and scale.args else None
    if not isinstance(levels, fx.Node) or not isinstance(choice, fx.Node) or not is_choice(choice):
        name = value.name if isinstance(value, fx.Node) else repr(value)
        raise NotIntegerError(f"the scale of {name} is not found as the program runs")
    dtype: Any = levels.args[5]
    if choice.target is run_time.CHOOSE:
        source, per_token, zero_point, qmin, qmax, eps = choice.args
    else:
        source, qmin, qmax, eps, _ = choice.args
        per_token, zero_point = False, None
    return RunTime(source, per_token, zero_point, qmin, qmax, dtype, eps)  # type: ignore[arg-type]


@computes("linear", formula=DYNAMIC, timing=Timing.DYNAMIC)
def write_linear_dynamic(task: Task) -> None:
    x, w = run_time_operand(task.argument("x")), task.quantized(task.argument("w"))
    made = task.emit(
        OPS["linear_dynamic"].target, x.node, *_weight(task, w), task.argument("b"), *x.grid, dtype=torch.float32
    )
    task.replace(task.core, made)


def _weight(task: Task, w: Quantized) -> tuple[Any, ...]:
    """A weight's integers, zero points where there are any, and scales."""
    zeros = task.keep("weight_zero_point", w.grid.zero_point.to(torch.int32)) if w.grid.zero_point.any() else None
    return w.node, zeros, task.keep("weight_scale", w.grid.scale.float())
