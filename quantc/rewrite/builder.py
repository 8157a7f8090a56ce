"""Builder for calls with known result types, for passes that decompose ops.

The operands must have known types. Sizes may be symbols; a size needed as an argument is then read from the tensor at
run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload

from quantc.errors import QuantcError
from quantc.ir.dialect import BY_NAME
from quantc.ir.program import Program
from quantc.ir.types import ScalarType, TensorType, tensor_type

Size = int | str


def known_type(node: fx.Node) -> TensorType:
    """The type of a tensor. QuantcError if it is unknown."""
    kind = tensor_type(node)
    if kind is None:
        raise QuantcError(f"the type of {node.name} is unknown", advice="capture with example inputs")
    return kind


def broadcast(left: Sequence[Size], right: Sequence[Size]) -> tuple[Size, ...]:
    """The broadcast shape of two operands."""
    rank = max(len(left), len(right))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in (left, right)]
    return tuple(_wider(*pair) for pair in zip(*padded, strict=True))


def _wider(left: Size, right: Size) -> Size:
    if left == 1:
        return right
    # a symbol beside a number larger than 1 can only have that value, or be 1
    return right if right != 1 and isinstance(right, int) else left


def times(sizes: Sequence[Size]) -> Size:
    """The product of sizes, as a number or an expression."""
    number = math.prod(size for size in sizes if isinstance(size, int))
    symbols = [size if size.isidentifier() else f"({size})" for size in sizes if isinstance(size, str)]
    if not symbols:
        return number
    return "*".join(symbols if number == 1 else [str(number), *symbols])


class Calls:
    """Inserts calls before a node, with its origin."""

    def __init__(self, program: Program, before: fx.Node) -> None:
        self.program = program
        self.before = before

    def call(self, target: OpOverload | str, *args: Any, kind: TensorType | ScalarType) -> fx.Node:
        """A call of any op, by short name or overload, with the type of its result."""
        found = BY_NAME[target].target if isinstance(target, str) else target
        return self.program.emit(found, args, before=self.before, value=kind)

    def size(self, x: fx.Node, dim: int) -> int | fx.Node:
        """A size as an argument: a number if it is known, else a node that reads it."""
        size = known_type(x).shape[dim]
        if isinstance(size, int):
            return size
        return self.call("sym_size", x, dim % known_type(x).rank, kind=ScalarType("int", size))

    def matmul(self, x: fx.Node, y: fx.Node) -> fx.Node:
        left, right = known_type(x), known_type(y)
        rows = left.shape[-2:-1]
        columns = right.shape[-1:] if right.rank > 1 else ()
        shape = (*broadcast(left.shape[:-2], right.shape[:-2]), *rows, *columns)
        return self.call("matmul", x, y, kind=TensorType(left.dtype, shape))

    def linear(self, x: fx.Node, w: fx.Node) -> fx.Node:
        kind = known_type(x)
        shape = (*kind.shape[:-1], known_type(w).shape[0])
        return self.call("linear", x, w, kind=TensorType(kind.dtype, shape))

    def transpose(self, x: fx.Node) -> fx.Node:
        """Swap the last two axes."""
        kind = known_type(x)
        shape = (*kind.shape[:-2], kind.shape[-1], kind.shape[-2])
        return self.call("transpose", x, kind.rank - 2, kind.rank - 1, kind=TensorType(kind.dtype, shape))

    def permute(self, x: fx.Node, dims: Sequence[int]) -> fx.Node:
        """Permute the axes; no call for the identity."""
        kind = known_type(x)
        if list(dims) == list(range(kind.rank)):
            return x
        if list(dims) == [*range(kind.rank - 2), kind.rank - 1, kind.rank - 2]:
            return self.transpose(x)
        shape = tuple(kind.shape[dim] for dim in dims)
        return self.call("permute", x, list(dims), kind=TensorType(kind.dtype, shape))

    def merge(self, x: fx.Node, start: int, count: int) -> fx.Node:
        """Merge `count` axes from `start` on into one; for none, an axis of size 1."""
        kind = known_type(x)
        if count == 1:
            return x
        merged = times(kind.shape[start : start + count])
        shape = (*kind.shape[:start], merged, *kind.shape[start + count :])
        if count == 0:
            return self.call("unsqueeze", x, start, kind=TensorType(kind.dtype, shape))
        return self.call("flatten", x, start, start + count - 1, kind=TensorType(kind.dtype, shape))

    def part(self, x: fx.Node, dim: int, sizes: Sequence[int | fx.Node], shape: Sequence[Size]) -> fx.Node:
        """The inverse of `merge`: split an axis; `sizes` as arguments, `shape` as known."""
        kind = known_type(x)
        if len(sizes) == 1:
            return x
        whole = TensorType(kind.dtype, (*kind.shape[:dim], *shape, *kind.shape[dim + 1 :]))
        if not sizes:
            return self.call("squeeze", x, dim, kind=whole)
        return self.call("unflatten", x, dim, list(sizes), kind=whole)

    def elementwise(self, target: OpOverload | str, x: fx.Node, *args: Any) -> fx.Node:
        """An elementwise op: the dtype of its first operand, the broadcast shape of all."""
        shape: tuple[Size, ...] = known_type(x).shape
        for other in args:
            if isinstance(other, fx.Node):
                shape = broadcast(shape, known_type(other).shape)
        return self.call(target, x, *args, kind=TensorType(known_type(x).dtype, shape))


__all__ = ["Calls", "Size", "broadcast", "known_type", "times"]
