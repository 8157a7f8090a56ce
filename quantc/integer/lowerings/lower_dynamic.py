"""Integer lowering of dynamically quantized convs and matmuls. They yield float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from quantc.integer.accumulators import AccumulatedWeight, accumulation
from quantc.integer.grid import Grid
from quantc.integer.library import OPS
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.integer.ops.dynamic import DYNAMIC, MATMUL, ROWS, WHOLE
from quantc.integer.proof.bounds import Layout
from quantc.integer.semantics import computes
from quantc.ir.dialect import argument, position
from quantc.ir.types import tensor_type
from quantc.qdq import choose_qparams as run_time
from quantc.qdq.ops import is_choice, is_dequantize
from quantc.qdq.registration import decomposed_ops
from quantc.spec.aten_arithmetic import aten
from quantc.spec.formats import Timing

WHERE_IT_COMES = "y likewise, where it comes"
OF_TWO = f"{ROWS}; {WHERE_IT_COMES}; acc = Σ (xq − xz)(yq − yz) in int32; out = f32(acc · (sx·sy))"
SCALED = f"{MATMUL.replace('round(b /', 'round(β·b /')}; {WHERE_IT_COMES}"


@dataclass(frozen=True)
class RunTime:
    """A dynamically quantized operand: the float tensor, and the parameters of its run-time qparams."""

    node: fx.Node
    per_token: bool
    zero_point: int | None
    """Center of a symmetric grid; None if it is affine."""
    qmin: int
    qmax: int
    dtype: torch.dtype
    eps: float

    @property
    def grid(self) -> tuple[Any, ...]:
        """Trailing quantization arguments of the dynamic ops."""
        return self.per_token, self.zero_point, self.qmin, self.qmax, self.dtype, self.eps

    @property
    def reach(self) -> Grid:
        """The grid as far as known statically: the zero point of an affine one may be anywhere."""
        ends = [self.qmin, self.qmax] if self.zero_point is None else [self.zero_point]
        return Grid(torch.ones((), dtype=torch.float64), torch.tensor(ends), self.qmin, self.qmax, self.dtype)

    @property
    def length(self) -> int | None:
        """Size of the last axis; None if unknown."""
        kind = tensor_type(self.node)
        last = kind.shape[-1] if kind is not None and kind.rank else None
        return last if isinstance(last, int) else None


def maybe_run_time(value: Any) -> RunTime | None:
    """The operand, if its qparams are found at run time; else None."""
    levels = value.args[0] if isinstance(value, fx.Node) and is_dequantize(value) else None
    scale = levels.args[1] if isinstance(levels, fx.Node) and len(levels.args) > 1 else None
    choice = scale.args[0] if isinstance(scale, fx.Node) and scale.args else None
    if not isinstance(levels, fx.Node) or not isinstance(choice, fx.Node) or not is_choice(choice):
        return None
    source, dtype = choice.all_input_nodes[0], argument(levels, "dtype")
    if choice.target is run_time.CHOOSE:
        per_token, zero_point, qmin, qmax, eps = choice.args[1:]
    elif choice.target is decomposed_ops().choose_qparams.tensor:
        (qmin, qmax, eps), per_token, zero_point = choice.args[1:4], False, None
    else:
        raise NotIntegerError(f"the scale of {source.name} is found by {choice.target}, which has no integer form")
    return RunTime(source, per_token, zero_point, qmin, qmax, dtype, eps)  # type: ignore[arg-type]


def run_time_operand(value: Any) -> RunTime:
    """An operand whose qparams must be found at run time."""
    found = maybe_run_time(value)
    if found is None:
        name = value.name if isinstance(value, fx.Node) else repr(value)
        raise NotIntegerError(f"the scale of {name} is not found as the program runs, and that of its other factor is")
    return found


def whole_run_time(value: Any, what: str) -> RunTime:
    """An operand that must be quantized per tensor: it is not summed along its last axis."""
    found = run_time_operand(value)
    if found.per_token:
        raise NotIntegerError(f"{found.node.name} has a scale for each token, and {what}")
    return found


# -- products with weights -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DynamicProduct:
    """A conv or matmul by a weight: the op and its arguments."""

    op: str
    x: RunTime
    w: Quantized
    layout: Layout
    window: tuple[Any, ...] = ()
    groups: int = 1
    trailing: int = 0
    """Number of axes after the output channels."""
    factor: float = 1.0
    addend_factor: float = 1.0


@computes("linear", formula=f"{DYNAMIC}; w likewise, where it comes", timing=Timing.DYNAMIC)
def write_linear_dynamic(task: Task) -> None:
    if maybe_run_time(task.argument("w")) is not None:
        return _write_linear_of_two(task)
    x, w = run_time_operand(task.argument("x")), _matrix(task, "w", 0)
    return _write(task, DynamicProduct("linear_dynamic", x, w, "rows"))


@computes("conv1d", "conv2d", "conv3d", formula=WHOLE, timing=Timing.DYNAMIC)
def write_conv_dynamic(task: Task) -> None:
    x, w = whole_run_time(task.argument("x"), "a convolution does not sum along tokens"), _weight(task, "w", 0)
    rank = _rank(task, w) - 2
    window = (*_window(task, rank, "stride", "padding", "dilation"), task.argument("groups"))
    _write(task, DynamicProduct("conv_dynamic", x, w, "rows", window, trailing=rank))


@computes("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", formula=WHOLE, timing=Timing.DYNAMIC)
def write_conv_transpose_dynamic(task: Task) -> None:
    x, w = whole_run_time(task.argument("x"), "a convolution does not sum along tokens"), _weight(task, "w", 1)
    rank, groups = _rank(task, w) - 2, task.argument("groups")
    before, after = _window(task, rank, "stride", "padding", "output_padding"), _window(task, rank, "dilation")
    window = (*before, groups, *after)
    _write(task, DynamicProduct("conv_transpose_dynamic", x, w, "transposed", window, groups, trailing=rank))


@computes("matmul", formula=OF_TWO, timing=Timing.DYNAMIC)
def write_matmul_dynamic(task: Task) -> None:
    if maybe_run_time(task.argument("y")) is not None:
        return _write_matmul_of_two(task, 1.0, 1.0)
    x, y = run_time_operand(task.argument("x")), _matrix(task, "y", 1)
    return _write(task, DynamicProduct("matmul_dynamic", x, y, "columns"))


@computes("addmm", "baddbmm", formula=SCALED, timing=Timing.DYNAMIC)
def write_addmm_dynamic(task: Task) -> None:
    alpha, beta = task.argument("alpha"), task.argument("beta")
    if not all(isinstance(number, int | float) for number in (alpha, beta)):
        raise NotIntegerError("what its terms are taken times is computed")
    if alpha == 0:
        raise NotIntegerError("its product is taken times 0")
    if maybe_run_time(task.argument("y")) is not None:
        return _write_matmul_of_two(task, float(alpha), float(beta))
    x, y = run_time_operand(task.argument("x")), _matrix(task, "y", 1)
    return _write(
        task, DynamicProduct("matmul_dynamic", x, y, "columns", factor=float(alpha), addend_factor=float(beta))
    )


def _weight(task: Task, name: str, axis: int) -> Quantized:
    """A constant factor with one scale, or one for each output channel."""
    w = task.quantized(task.argument(name))
    if task.constant(w.node) is None:
        raise NotIntegerError(f"{w.node.name} is quantized beforehand, and its other factor as it comes")
    if w.grid.axis not in (None, axis):
        raise NotIntegerError(f"the weight's scales lie along axis {w.grid.axis}, not along the output channels")
    return w


def _matrix(task: Task, name: str, axis: int) -> Quantized:
    w = _weight(task, name, axis)
    if _rank(task, w) != 2:
        raise NotIntegerError(f"{w.node.name} is not one matrix")
    return w


def _rank(task: Task, w: Quantized) -> int:
    weight = task.constant(w.node)
    return 0 if weight is None else weight.dim()


def _window(task: Task, rank: int, *names: str) -> list[list[int]]:
    """Options of a convolution, with a number for each axis."""
    found = []
    for name in names:
        value = task.argument(name)
        values = [value] if isinstance(value, int) else list(value)
        found.append(values * rank if len(values) == 1 else values)
    return found


def _write(task: Task, product: DynamicProduct) -> None:
    x, w = product.x, product.w
    weight = AccumulatedWeight(w.grid, task.constant(w.node), product.layout, product.groups)
    parts = accumulation(x.reach, weight, None, None, task.arithmetic.sum_bits).parts
    bias, addend = _addend(task, product.addend_factor, product.trailing)
    args = (
        x.node,
        w.node,
        task.keep("weight_zero_point", w.grid.zero_point.to(torch.int32)) if bool(w.grid.zero_point.any()) else None,
        task.keep("weight_scale", weight.by_output(w.grid.scale).float()),
        bias,
        *product.window,
        *(x.grid[1:] if product.trailing else x.grid),
        *([product.factor] if product.layout == "columns" else []),
        parts,
    )
    _finish(task, product.op, args, addend)


# -- products of two tensors that come ----------------------------------------------------------------------------------


def _write_linear_of_two(task: Task) -> None:
    x, w = run_time_operand(task.argument("x")), run_time_operand(task.argument("w"))
    kind = tensor_type(w.node)
    if kind is None or kind.rank != 2:
        raise NotIntegerError(f"{w.node.name} is not known to be one matrix")
    parts = _parts(task, x, w)
    bias, addend = _addend(task, 1.0)
    args = (x.node, w.node, bias, *x.grid, *w.grid, parts)
    _finish(task, "linear_both_dynamic", args, addend)


def _write_matmul_of_two(task: Task, alpha: float, beta: float) -> None:
    x = run_time_operand(task.argument("x"))
    y = whole_run_time(task.argument("y"), "a product sums over these")
    parts = _parts(task, x, y)
    bias, addend = _addend(task, beta)
    args = (x.node, y.node, bias, *x.grid, *y.grid, alpha, parts)
    _finish(task, "matmul_both_dynamic", args, addend)


def _parts(task: Task, x: RunTime, y: RunTime) -> int:
    weight = AccumulatedWeight(y.reach, None)
    return accumulation(x.reach, weight, None, x.length, task.arithmetic.sum_bits).parts


# -- what is added, and the end ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class DynamicAddend:
    """A tensor that is added in float, times a number."""

    node: fx.Node
    factor: float


def _addend(task: Task, factor: float, trailing: int = 0) -> tuple[fx.Node | None, DynamicAddend | None]:
    """The addend of a conv or matmul: a bias, if it is a constant with one element per output channel, or one for all;
    anything else is added in float.
    """
    target: Any = task.core.target
    node = task.argument("b") if position(target, "b") >= 0 else None
    if node is None or not factor:
        return None, None
    constant = task.constant(node)
    if constant is not None and all(size == 1 for size in constant.shape[:-1]):
        vector = constant.detach().reshape(-1)
        is_kept = factor == 1 and constant.dim() == 1
        return node if is_kept else task.keep("bias", vector if factor == 1 else vector.double() * factor), None
    if trailing:
        raise NotIntegerError(f"the bias {node.name} is not a constant")
    return None, DynamicAddend(node, factor)


def _finish(task: Task, op: str, args: tuple[Any, ...], addend: DynamicAddend | None) -> None:
    made = task.emit(OPS[op].target, *args, dtype=torch.float32, like=task.core)
    if addend is None:
        return task.replace(task.core, made)
    task.claim(made)
    more: Any = addend.node
    if addend.factor != 1.0:
        kind = tensor_type(more)
        more = task.program.emit(aten.mul.Tensor, (more, addend.factor), before=task.core, like=more, value=kind)
    return task.stand_in(task.core, task.emit(aten.add.Tensor, made, more, dtype=torch.float32, like=task.core))
