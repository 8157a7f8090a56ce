"""Size expressions such as `s0` or `2*s0 + 1`, evaluated without executing text.

Dumps and archives carry these as strings. They are parsed with `ast`, and only arithmetic is accepted.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache

BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
CALLS: dict[str, Callable[..., int]] = {"Max": max, "Min": min, "max": max, "min": min}


@lru_cache(maxsize=4096)
def _tree(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def evaluate(expression: str, sizes: Mapping[str, int]) -> int | None:
    """The value of an expression; None if it has an unbound symbol or anything but integer arithmetic."""
    try:
        return _value(_tree(expression), sizes)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError):
        return None


def least(expression: str, ranges: Mapping[str, tuple[int, int | None]]) -> int | None:
    """A lower bound of a size expression; None if the ranges of its symbols do not give one."""
    try:
        return _least(_tree(expression), ranges)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _least(tree: ast.expr, ranges: Mapping[str, tuple[int, int | None]]) -> int:
    """Lower bound by monotonicity: a monotone expression of the lower bounds of its parts."""
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name) if name in ranges:
            return ranges[name][0]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _least(left, ranges) + _least(right, ranges)
        case ast.BinOp(left=left, op=ast.Sub(), right=ast.Constant(value=int(number))):
            return _least(left, ranges) - number
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            factors = _least(left, ranges), _least(right, ranges)
            if min(factors) >= 0:
                return factors[0] * factors[1]
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=ast.Constant(value=int(number))) if number > 0:
            return _least(left, ranges) // number
        case ast.Call(func=ast.Name(id="FloorDiv"), args=[left, ast.Constant(value=int(number))]) if number > 0:
            return _least(left, ranges) // number
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name in CALLS:
            return CALLS[name](*(_least(argument, ranges) for argument in args))
        case _:
            pass
    raise ValueError(ast.dump(tree))


def _value(tree: ast.expr, sizes: Mapping[str, int]) -> int:
    match tree:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner, sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id="FloorDiv"), args=[left, right], keywords=[]):
            return _value(left, sizes) // _value(right, sizes)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if name in CALLS:
            return CALLS[name](*(_value(argument, sizes) for argument in args))
        case _:
            raise ValueError(ast.dump(tree))
