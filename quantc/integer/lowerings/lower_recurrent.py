"""Integer lowering of dynamically quantized recurrent layers."""

from __future__ import annotations

from typing import Any

from torch import fx

from quantc.integer.accumulators import AccumulatedWeight, accumulation
from quantc.integer.library import OPS
from quantc.integer.lowerings.lower_dynamic import RunTime, run_time_operand
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.integer.ops.recurrent import KINDS
from quantc.integer.semantics import computes
from quantc.ir.dialect import op_name
from quantc.ir.program import Program
from quantc.ir.types import type_of
from quantc.spec.formats import Timing

LAYERS = tuple(KINDS)
CELLS = tuple(f"{name}_cell" for name in KINDS)
FORMULA = (
    "products of input and state as those of a dynamic linear layer: the input of each layer is quantized as a whole, "
    "the state at each step; gates in float32"
)
NOTE = (
    "the hidden state of recurrent layers, and what goes from one layer to the next, is quantized in integer form and on "
    "kernels, and float in Q/DQ form"
)


def state_notes(program: Program) -> tuple[str, ...]:
    """Notes on quantization that the Q/DQ form of a program does not show."""
    claims = program.plan.claims
    timings = {claims[node].timing for node in program.nodes() if node in claims and op_name(node) in LAYERS + CELLS}
    return (NOTE,) if Timing.DYNAMIC in timings else ()


@computes(*LAYERS, formula=FORMULA, timing=Timing.DYNAMIC)
def write_layers(task: Task) -> None:
    x, params = run_time_operand(task.argument("x")), list(task.argument("params"))
    group = 4 if task.argument("has_biases") else 2
    count = task.argument("num_layers") * (2 if task.argument("bidirectional") else 1)
    if len(params) != group * count:
        raise NotIntegerError("it projects its state (proj_size), for which there is no integer form and no kernel")
    if task.argument("train") and task.argument("dropout"):
        raise NotIntegerError("it drops parts of what goes from layer to layer, as in training")
    found = [_weight(task, params[start + index], x) for start in range(0, len(params), group) for index in (0, 1)]
    biases = [params[start + index] for start in range(0, len(params), group) for index in range(2, group)]
    weights, scales = [w.node for w in found], [_scale(task, w, index) for index, w in enumerate(found)]
    layout = (task.argument("num_layers"), task.argument("bidirectional"), task.argument("batch_first"))
    _write(task, (x.node, task.argument("hx"), weights, scales, biases, *layout, *x.grid))


@computes(*CELLS, formula=FORMULA, timing=Timing.DYNAMIC)
def write_cell(task: Task) -> None:
    x = run_time_operand(task.argument("x"))
    found = [_weight(task, task.argument(name), x) for name in ("w_ih", "w_hh")]
    weights, scales = [w.node for w in found], [_scale(task, w, index) for index, w in enumerate(found)]
    biases = (task.argument("b_ih"), task.argument("b_hh"))
    _write(task, (x.node, task.argument("hx"), *weights, *scales, *biases, *x.grid))


def _write(task: Task, args: tuple[Any, ...]) -> None:
    core = task.core
    made = task.program.emit(OPS[f"{op_name(core)}_dynamic"].target, args, before=core, like=core, value=type_of(core))
    task.notes.append(NOTE)
    task.replace(core, made)


def _weight(task: Task, value: Any, x: RunTime) -> Quantized:
    """A weight, whose sums fit 32 bits whatever it is multiplied with on the grid of the input."""
    found = task.quantized(value)
    levels = task.constant(found.node)
    if levels is None or found.grid.axis not in (None, 0):
        raise NotIntegerError(f"{found.node.name} is no constant with scales for its rows")
    if found.grid.zero_point.any():
        raise NotIntegerError(f"{found.node.name} is not symmetric")
    accumulation(x.reach, AccumulatedWeight(found.grid, levels), None, levels.shape[1], task.arithmetic.sum_bits)
    return found


def _scale(task: Task, weight: Quantized, index: int) -> fx.Node:
    return task.keep(f"scale_{index}", weight.grid.scale.float())
