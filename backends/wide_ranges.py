"""Detection of tensors between a square and a root: keeps rules from putting them on 8 bits.

A square has twice the decades of what it is of, and a root or a logarithm reads the small numbers as closely as the large
ones. On an even grid of 256 levels whatever is below 1/16 of the largest is lost once it is squared; so magnitudes, norms,
variances and log spectra stay float from the square to the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch import fx

from quantc.ir.dialect import argument, is_op, op_name, ops_in
from quantc.ir.op_row import MOVES, Family
from quantc.patterns.predicates import predicate
from quantc.patterns.rule import Match

NARROW = "narrow-range"
"""The name of the condition."""
MAX_NODES = 32
"""Bound of the search in each direction."""
READS_CLOSELY = frozenset(
    {"sqrt", "rsqrt", "log", "reciprocal", *(f"aten.{name}.default" for name in ("log2", "log10", "log1p"))}
)
"""Ops to which a small number matters as much as a large one, beside fractional powers and divisors."""
THROUGH = frozenset(
    {
        *ops_in(*MOVES, Family.JOIN, Family.AVERAGE_POOL, Family.ADAPTIVE_POOL, Family.EXTREME, overloads=True),
        *("add", "sub", "rsub", "sum", "mean", "clamp", "relu", "cast", "maximum", "minimum"),
        *("aten.sum.default", "aten.mean.default", "aten.clamp_min.default", "operator:getitem"),
    }
)
"""Ops that keep the decades of what they read, beside products with numbers."""


@predicate(NARROW)
def why_not_narrow(match: Match) -> str | None:
    """Nothing between a square and a root, or before a logarithm: such tensors span more decades than 8 bits resolve."""
    found = next(filter(_is_square, _reach(match.root, lambda node: node.all_input_nodes)), None)
    if found is not None:
        return f"{_named(match, found)} spans more decades than 8 bits resolve, as a square does"
    kept = (node for node in _reach(match.root, lambda node: [*node.users]) if node is match.root or _is_through(node))
    reader = next((user for node in kept for user in node.users if _reads_closely(user, node)), None)
    if reader is not None:
        return f"{_named(match, reader)} reads small numbers as closely as large ones, and 8 bits round them to nothing"
    return None


def _named(match: Match, node: fx.Node) -> str:
    return match.program.describe(node)


def _reach(start: fx.Node, further: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    """A node, and those that it reaches by ops that keep decades."""
    return islice(_walk(start, further), MAX_NODES)


def _walk(start: fx.Node, further: Callable[[fx.Node], list[fx.Node]]) -> Iterator[fx.Node]:
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        yield node
        if node is not start and not _is_through(node):
            continue
        fresh = [each for each in further(node) if each not in seen]
        seen.update(fresh)
        pending += fresh


def _is_through(node: fx.Node) -> bool:
    if is_op(node, "mul", "div"):
        return not isinstance(argument(node, "y"), fx.Node)
    return op_name(node) in THROUGH


def _is_square(node: fx.Node) -> bool:
    if is_op(node, "mul"):
        return isinstance(argument(node, "x"), fx.Node) and argument(node, "x") is argument(node, "y")
    if is_op(node, "pow"):
        return _magnitude(argument(node, "exponent")) > 1
    return op_name(node) == "aten.square.default"


def _reads_closely(node: fx.Node, value: fx.Node) -> bool:
    if is_op(node, "div"):
        return argument(node, "y") is value
    if is_op(node, "pow"):
        exponent = argument(node, "exponent")
        return isinstance(exponent, int | float) and exponent < 1
    return op_name(node) in READS_CLOSELY


def _magnitude(exponent: Any) -> float:
    return abs(float(exponent)) if isinstance(exponent, int | float) else 0.0
