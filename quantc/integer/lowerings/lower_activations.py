"""Integer lowering of unary functions and softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from quantc.integer.fixed_point import mantissa_and_shift
from quantc.integer.grid import Grid
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.integer.ops.lookup_tables import INDEXABLE, LOOKED_UP, LOOKUP, table_of
from quantc.integer.ops.softmax import SOFTMAX, SOFTMAX_DEVIATION, SOFTMAX_OP, powers_of
from quantc.integer.semantics import computes
from quantc.ir.curves import Curve, compose, prelu
from quantc.ir.dialect import CURVES, curve_of, op_name
from quantc.ir.types import tensor_type

SMOOTH = tuple(name for name in CURVES if name not in ("relu", "clamp"))
"""Relu and clamp need no table: they are bounds."""


@computes(*SMOOTH, formula=LOOKED_UP)
def _unary(task: Task) -> None:
    x = _indexable(task)
    curve = _curve(task.core)
    _write_lookup(task, x, Curve(compose([curve, *map(_curve, task.tail)]), rows=curve.rows), axis=0)


@computes("prelu", formula=f"{LOOKED_UP}; f(x) = x if x > 0 else slope · x, with a table for each slope")
def _prelu(task: Task) -> None:
    x, slope, kind = _indexable(task), task.constant(task.argument("w")), tensor_type(task.core)
    if slope is None:
        raise NotIntegerError("its slope is not a constant")
    if slope.numel() > 1 and (kind is None or kind.rank < 2):
        raise NotIntegerError("it has several slopes, and its operand no axis of channels")
    curve = prelu(slope)
    _write_lookup(task, x, Curve(compose([curve, *map(_curve, task.tail)]), rows=curve.rows), axis=1)


def _indexable(task: Task) -> Quantized:
    x = task.whole(task.argument("self"))
    if x.grid.dtype not in INDEXABLE:
        raise NotIntegerError(f"{x.node.name} is {x.grid.dtype}, and a table for it would be too long")
    return x


def _curve(node: fx.Node) -> Curve:
    found = curve_of(node)
    if found is None:
        raise NotIntegerError(f"{op_name(node)} with these options has no table")
    return found


def _result_grids(task: Task) -> dict[fx.Node, Grid]:
    """The grids of the result's readers, which must all be quantizers."""
    quantizers = task.quantizers()
    if not quantizers:
        raise NotIntegerError("its result is read in float")
    return {quantizer: task.grid(quantizer) for quantizer in quantizers}


def _write_lookup(task: Task, x: Quantized, curve: Curve, axis: int) -> None:
    for quantizer, grid in _result_grids(task).items():
        table = task.keep("table", table_of(curve, x.grid, grid))
        task.replace(quantizer, task.emit(LOOKUP.target, x.node, table, axis, dtype=grid.dtype))


# -- softmax -----------------------------------------------------------------------------------------------------


@computes("softmax", "aten._safe_softmax.default", formula=SOFTMAX, deviation=SOFTMAX_DEVIATION)
def _softmax(task: Task) -> None:
    if task.tail:
        raise NotIntegerError("something follows it in the match")
    if task.argument("dtype") not in (None, torch.float32):
        raise NotIntegerError(f"it computes in {task.argument('dtype')}")
    x, dim = _indexable(task), task.argument("dim")
    kind = tensor_type(task.core)
    size = kind.shape[dim] if kind is not None and kind.rank else None
    length = size if isinstance(size, int) else None
    for quantizer, grid in _result_grids(task).items():
        multiplier, shift, bits = _inverse(task, grid)
        powers = task.keep("powers", powers_of(x.grid, length, bits))
        kept = task.keep("multiplier", multiplier), None if shift is None else task.keep("shift", shift)
        rest: tuple[Any, ...] = (*kept, grid.one_zero_point, grid.qmin, grid.qmax, grid.dtype)
        task.replace(quantizer, task.emit(SOFTMAX_OP.target, x.node, powers, dim, *rest, dtype=grid.dtype))


def _inverse(task: Task, out: Grid) -> tuple[Tensor, Tensor | None, int]:
    """`1 / scale` as multiplier and shift, and how many bits the multiplier has.

    A power of two is an integer, and exact, whichever form was asked for.
    """
    fraction, exponent = math.frexp(1.0 / out.one_scale)
    if fraction == 0.5 and 1 <= exponent <= 31:
        return torch.tensor(2**exponent), torch.tensor(1), exponent
    task.check_shifts(1.0 / out.scale)
    if task.arithmetic.multiplier == "float64":
        return torch.tensor(1.0 / out.one_scale, dtype=torch.float64), None, 0
    mantissa, shift = mantissa_and_shift(1.0 / out.scale)
    if int(shift) < 1:
        raise NotIntegerError("the scale of its result is too small for a mantissa of 32 bits")
    return mantissa, shift, 31


__all__ = ["SMOOTH"]
