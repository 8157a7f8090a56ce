"""Integer lowering of convolutions, linear layers and matmuls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from quantc.integer.accumulators import AccumulatedWeight, accumulation, fit_scales
from quantc.integer.bias_grid import stored_bias
from quantc.integer.epilogue import Term, finish, finish_sum, term
from quantc.integer.library import OPS
from quantc.integer.lowerings.lower_grouped import write_linear_grouped
from quantc.integer.lowerings.step_tables import steps_of, write_steps
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task, bounds_of, tail_bounds
from quantc.integer.ops.products import ACCUMULATOR
from quantc.integer.ops.rescaling import REQUANTIZED
from quantc.integer.proof.bounds import Layout
from quantc.integer.semantics import computes
from quantc.ir.dialect import CURVES, argument, is_op, op_name
from quantc.ir.types import tensor_type
from quantc.spec.aten_arithmetic import aten
from quantc.spec.numerics import quantize_bias

FORMULA = f"{ACCUMULATOR}; {REQUANTIZED.replace('(xq − xz)', 'acc').replace('sx / so', 'sx·sw / so')}"
OF_TWO = FORMULA.replace("w", "y")
SCALED = OF_TWO.replace("round(b /", "round(β·b /").replace("sx·sy", "α·sx·sy")


@dataclass(frozen=True, eq=False)
class Addend:
    """A tensor that is added to the result, times a number."""

    node: fx.Node
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class StaticProduct:
    """A conv or matmul to lower: the op and its arguments."""

    op: str
    x: Quantized
    w: Quantized
    layout: Layout
    window: tuple[Any, ...] = ()
    """Arguments between the bias and `parts`."""
    groups: int = 1
    trailing: int = 0
    """Number of axes after the output channels."""
    factor: float = 1.0
    addend: Addend | None = None


@dataclass(frozen=True, eq=False)
class Head:
    """A conv or matmul without its epilogue arguments."""

    target: Any
    args: tuple[Any, ...]
    scale: Tensor
    """Of the accumulator: one, or shaped to go with it."""
    largest: int
    """The most that the accumulator can be."""


@computes("linear", formula=FORMULA)
def _linear(task: Task) -> None:
    in_groups = task.grouped(task.argument("w"))
    if in_groups is not None:
        return write_linear_grouped(task, in_groups)
    x, w = _factors(task, "w", axis=0)
    return _write(task, StaticProduct("linear", x, w, "rows", addend=_bias(task)))


@computes("conv1d", "conv2d", "conv3d", formula=FORMULA)
def _conv(task: Task) -> None:
    x, w = _factors(task, "w", axis=0)
    rank = _window_rank(task, w)
    window = (*_window(task, rank, "stride", "padding", "dilation"), task.argument("groups"))
    _write(task, StaticProduct("conv", x, w, "rows", window, trailing=rank, addend=_bias(task)))


@computes("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", formula=FORMULA)
def _conv_transpose(task: Task) -> None:
    x, w = _factors(task, "w", axis=1)
    rank, groups = _window_rank(task, w), task.argument("groups")
    before, after = _window(task, rank, "stride", "padding", "output_padding"), _window(task, rank, "dilation")
    window = (*before, groups, *after)
    _write(task, StaticProduct("conv_transpose", x, w, "transposed", window, groups, trailing=rank, addend=_bias(task)))


@computes("matmul", formula=OF_TWO)
def _matmul(task: Task) -> None:
    x, y = _factors(task, "y", axis=1)
    _write(task, StaticProduct("matmul", x, y, "columns"))


@computes("addmm", "baddbmm", formula=SCALED)
def _addmm(task: Task) -> None:
    x, y = _factors(task, "y", axis=1)
    alpha, beta = task.argument("alpha"), task.argument("beta")
    if not all(isinstance(number, int | float) for number in (alpha, beta)):
        raise NotIntegerError("what its terms are taken times is computed")
    if alpha == 0:
        raise NotIntegerError("its product is taken times 0")
    addend = Addend(task.argument("b"), float(beta)) if beta else None
    _write(task, StaticProduct("matmul", x, y, "columns", factor=float(alpha), addend=addend))


# -- what they read ------------------------------------------------------------------------------------------------


def _factors(task: Task, second: str, axis: int) -> tuple[Quantized, Quantized]:
    """The two factors. Only the second may have several scales, along its axis of output channels."""
    x, w = task.whole(task.argument("x")), task.quantized(task.argument(second))
    if w.grid.axis not in (None, axis):
        raise NotIntegerError(f"the weight's scales lie along axis {w.grid.axis}, not along the output channels")
    kind = tensor_type(w.node)
    if second == "y" and w.grid.axis is not None and (kind is None or kind.rank != 2):
        raise NotIntegerError(f"{w.node.name} has scales for channels, and is not known to be one matrix")
    return x, w


def _bias(task: Task) -> Addend | None:
    node = task.argument("b")
    if isinstance(node, fx.Node) and not is_op(task.core, "linear") and not _is_constant(task, node):
        raise NotIntegerError(f"the bias {node.name} is not a constant")
    return None if node is None else Addend(node)


def _is_constant(task: Task, node: fx.Node) -> bool:
    """True if a tensor is a constant, in float or quantized."""
    quantized = task.maybe_quantized(node)
    return task.constant(node if quantized is None else quantized.node) is not None


def _window_rank(task: Task, w: Quantized) -> int:
    weight = task.constant(w.node)
    if weight is None:
        raise NotIntegerError(f"the weight {w.node.name} is not a constant")
    return weight.dim() - 2


def _window(task: Task, rank: int, *names: str) -> list[list[int]]:
    """Options of a convolution, with a number for each axis."""
    found = []
    for name in names:
        value = task.argument(name)
        values = [value] if isinstance(value, int) else list(value)
        found.append(values * rank if len(values) == 1 else values)
    return found


def _count(x: Quantized) -> int | None:
    """Number of summands; None if unknown."""
    kind = tensor_type(x.node)
    last = kind.shape[-1] if kind is not None and kind.rank else None
    return last if isinstance(last, int) else None


def _vector(task: Task, addend: Addend) -> Tensor | None:
    """A constant with an element for each output channel, or one for all, in float64; None if it is none."""
    constant = task.constant(addend.node)
    if constant is None or any(size != 1 for size in constant.shape[:-1]):
        return None
    return constant.detach().double().reshape(-1) * addend.factor


# -- writing -------------------------------------------------------------------------------------------------------


def _write(task: Task, product: StaticProduct) -> None:
    """Lower a conv or matmul with its addend and epilogue.

    A constant vector is the bias. Any other addend is a second term of a sum that is rounded once, if it and the result
    are quantized; otherwise it is added in float, to a float result.
    """
    addend = product.addend
    vector = None if addend is None else _vector(task, addend)
    stored = None if addend is None or vector is not None else _quantized_bias(task, product, addend)
    head = _head(task, product, vector, stored)
    if addend is None or vector is not None or stored is not None:
        _write_with_tail(task, head)
    else:
        _write_with_addend(task, head, addend)


def _quantized_bias(task: Task, product: StaticProduct, addend: Addend) -> Tensor | None:
    """The bias, if it comes quantized as the accumulator is."""
    w = AccumulatedWeight(product.w.grid, None, product.layout, product.groups)
    found = stored_bias(task, addend.node, product.x.grid.scale * w.by_output(w.grid.scale))
    if found is not None and addend.factor == product.factor == 1:
        return found
    if product.trailing:
        raise NotIntegerError(f"the bias {addend.node.name} is quantized otherwise than the accumulator")
    return None


def _head(task: Task, product: StaticProduct, vector: Tensor | None, stored: Tensor | None) -> Head:
    x, step = product.x.grid, product.x.grid.scale * product.factor
    given = AccumulatedWeight(product.w.grid, task.constant(product.w.node), product.layout, product.groups)
    weight, bias = given, stored
    notes: list[str] = []
    if vector is not None and product.addend is not None:
        where = task.program.describe(product.addend.node)
        weight, raised = fit_scales(given, vector, step, task.arithmetic.scale_digits)
        bias = quantize_bias(vector, step, weight.by_output(weight.grid.scale), where=where)
        if raised:
            notes.append(f"{where}: {raised} weight scales raised so that the bias fits 32 bits")
    sums = accumulation(x, weight, bias, _count(product.x), task.arithmetic.sum_bits)
    task.notes += notes
    scale = step * weight.by_output(weight.grid.scale)
    args = (
        product.x.node,
        x.one_zero_point,
        product.w.node if weight.levels is None or weight is given else task.keep("weight", weight.levels),
        task.keep("zero_point", weight.grid.zero_point) if bool(weight.grid.zero_point.any()) else None,
        None if bias is None else task.keep("bias", bias),
        *product.window,
        sums.parts,
    )
    shaped = scale if weight.grid.is_whole else scale.reshape(-1, *[1] * product.trailing)
    return Head(OPS[product.op].target, args, shaped, sums.largest)


def _write_with_tail(task: Task, head: Head) -> None:
    """A tail that only clamps becomes bounds. A quantized tensor that is added, and a curve, take the accumulator."""
    if task.tail and task.quantizers():
        other = _tail_addend(task)
        if other is not None and tail_bounds(task.tail[1:]) is not None:
            return finish_sum(task, [_accumulator(task, head), term(other)], of=task.tail[0])
        if _has_steps(task, head):
            accumulator = _accumulator(task, head).node
            for quantizer in task.quantizers():
                write_steps(task, accumulator, head.scale, task.root, quantizer)
            return None
    return finish(task, head.target, head.args, head.scale)


def _tail_addend(task: Task) -> Quantized | None:
    """Tensor that the first op of the tail adds, if it is quantized per tensor."""
    first = task.tail[0]
    if not is_op(first, "add") or argument(first, "alpha") != 1:
        return None
    sides = [side for side in first.args[:2] if side is not task.core]
    found = task.maybe_quantized(sides[0]) if len(sides) == 1 else None
    return found if found is not None and found.grid.is_whole else None


def _has_steps(task: Task, head: Head) -> bool:
    """True if the tail is one activation that has a step table to each output grid."""
    is_curve = op_name(task.root) in CURVES or is_op(task.root, "prelu")
    if len(task.tail) != 1 or not is_curve or bounds_of(task.root) is not None or task.curves == "float":
        return False
    try:
        for quantizer in task.quantizers():
            steps_of(task, head.scale, task.root, quantizer)
    except NotIntegerError:
        return False
    return True


def _accumulator(task: Task, head: Head) -> Term:
    """The accumulator itself."""
    nowhere = (None, None, 0, 0, 0, torch.int32)
    node = task.emit(head.target, *head.args, *nowhere, dtype=torch.int32, like=task.core)
    return Term(node, 0, head.scale, head.largest)


def _write_with_addend(task: Task, head: Head, addend: Addend) -> None:
    other = task.maybe_quantized(addend.node)
    is_whole = other is not None and other.grid.is_whole
    if other is not None and is_whole and task.quantizers() and tail_bounds(task.tail) is not None:
        return finish_sum(task, [_accumulator(task, head), term(other, addend.factor)], of=task.core)
    product = task.emit(head.target, *head.args, *task.to_float(head.scale), dtype=torch.float32, like=task.core)
    task.claim(product)
    more: Any = addend.node
    if addend.factor != 1.0:
        kind = tensor_type(more)
        more = task.program.emit(aten.mul.Tensor, (more, addend.factor), before=task.core, like=more, value=kind)
    return task.stand_in(task.core, task.emit(aten.add.Tensor, product, more, dtype=torch.float32, like=task.core))
