"""Integer lowering of elementwise add and mul."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quantc.integer.epilogue import finish, finish_sum, reach, term
from quantc.integer.match_lowering import NotIntegerError, Quantized, Task
from quantc.integer.ops.elementwise import MUL, MULTIPLIED, SUMMED
from quantc.integer.ops.rescaling import REQUANTIZE, REQUANTIZED
from quantc.integer.semantics import computes
from quantc.ir.dialect import op_name

SIGNS = {"add": (1.0, 1.0), "sub": (1.0, -1.0), "rsub": (-1.0, 1.0)}
"""Of both operands; `rsub(x, y)` is `y - x`."""


@computes(*SIGNS, formula=f"{SUMMED}; M_i < 0 for what is subtracted; offset = c / so for a number c")
def _sum(task: Task) -> None:
    if task.argument("alpha") != 1:
        raise NotIntegerError(f"its alpha is {task.argument('alpha')}, not 1")
    terms, offset = [], None
    for operand, sign in zip("xy", SIGNS[op_name(task.core)], strict=True):
        number = _number(task, task.argument(operand))
        if number is None:
            terms.append(term(task.whole(task.argument(operand)), sign))
        else:
            offset = sign * number
    if not terms:
        raise NotIntegerError("it has no operand that comes quantized")
    finish_sum(task, terms, offset)


@computes("mul", formula=f"{MULTIPLIED}; by a number c: {REQUANTIZED.replace('sx / so', 'sx·c / so')}")
def _mul(task: Task) -> None:
    x, y = task.argument("x"), task.argument("y")
    for tensor, number in ((x, _number(task, y)), (y, _number(task, x))):
        if number is not None:
            scaled = task.whole(tensor)
            return _by_number(task, scaled, scaled.grid.scale * number)
    left, right = task.whole(x), task.whole(y)
    head = (left.node, left.grid.one_zero_point, right.node, right.grid.one_zero_point)
    largest = reach(left.grid) * reach(right.grid)
    task.check_room(largest)
    return finish(task, MUL.target, head, left.grid.scale * right.grid.scale, largest=largest)


@computes("div", formula=f"by a number c: {REQUANTIZED.replace('sx / so', '(sx / c) / so')}")
def _div(task: Task) -> None:
    number = _number(task, task.argument("y"))
    if number is None:
        raise NotIntegerError("it does not divide by a number")
    if not number:
        raise NotIntegerError("it divides by zero")
    x = task.whole(task.argument("x"))
    _by_number(task, x, x.grid.scale / number)


def _by_number(task: Task, x: Quantized, scale: Tensor) -> None:
    """The integers of `x` on another scale."""
    finish(task, REQUANTIZE.target, (x.node, x.grid.one_zero_point), scale)


def _number(task: Task, value: Any) -> Tensor | None:
    """An operand that is one known number, in float64: a Python number, or a constant without axes."""
    found = task.constant(value)
    if found is not None:
        if found.dim() or found.is_complex():
            return None
        number = found.detach().double()
    elif isinstance(value, int | float):
        number = torch.tensor(float(value), dtype=torch.float64)
    else:
        return None
    if not math.isfinite(number.item()):
        raise NotIntegerError(f"its operand {value} is not finite")
    return number
