"""Multiply-accumulate counts of ops, and the tensors they multiply.

Counted from the types of a program. Dynamic sizes are those of the example inputs; without these the count is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from quantc.ir.dialect import FACTORS, argument, op_name, ops_in, short_name
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import tensor_type

Sizes = Mapping[str, int]
INSIDE = None
"""Stands for a tensor internal to an op, such as the hidden state of a recurrent layer."""


@dataclass(frozen=True, slots=True)
class MultiplyAdds:
    """Multiply-adds of two or more tensors, given by the nodes that yield them."""

    count: int
    factors: tuple[fx.Node | None, ...]


Count = Callable[[fx.Node, Sizes], "tuple[MultiplyAdds, ...]"]
"""Counts the multiply-adds of an op."""


def example_sizes(program: Program) -> dict[str, int]:
    """The values of a program's dynamic sizes in its example inputs."""
    sizes: dict[str, int] = {}
    inputs = program.graph.find_nodes(op="placeholder")
    for node, value in zip(inputs, program.example_inputs or (), strict=False):
        kind = tensor_type(node)
        shape = getattr(value, "shape", ())
        if kind is None or len(shape) != kind.rank:
            continue
        sizes |= {name: size for name, size in zip(kind.shape, shape, strict=True) if isinstance(name, str)}
    return sizes


def products(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...] | None:
    """The multiply-adds of an op: empty for most ops, None if a size is unknown."""
    count = _COUNTS.get(op_name(node))
    if count is None:
        return ()
    try:
        return count(node, sizes)
    except _UnknownSizeError:
        return None


def is_product(node: fx.Node) -> bool:
    """True if an op multiplies tensors and accumulates."""
    return op_name(node) in _COUNTS


class _UnknownSizeError(Exception):
    """An unknown size; caught by `products`."""


def _shape(value: Any, sizes: Sizes) -> tuple[int, ...]:
    kind = tensor_type(value)
    if kind is None:
        raise _UnknownSizeError
    shape: list[int] = []
    for size in kind.shape:
        known = size if isinstance(size, int) else evaluate(size, sizes)
        if known is None:
            raise _UnknownSizeError
        shape.append(known)
    return tuple(shape)


def _convolution(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    x, w = argument(node, "x"), argument(node, "w")
    return (MultiplyAdds(math.prod(_shape(node, sizes)) * math.prod(_shape(w, sizes)[1:]), (x, w)),)


def _transposed_conv(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    """Each input element is multiplied with the whole kernel once."""
    x, w = argument(node, "x"), argument(node, "w")
    return (MultiplyAdds(math.prod(_shape(x, sizes)) * math.prod(_shape(w, sizes)[1:]), (x, w)),)


def _product(left: str, right: str) -> Count:
    """For a matrix product of two arguments. A weight may be stored transposed, so the reduced size is that of `left`."""

    def count(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
        x, y = argument(node, left), argument(node, right)
        return (MultiplyAdds(math.prod(_shape(node, sizes)) * _shape(x, sizes)[-1], (x, y)),)

    return count


def _bilinear(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    x, y, w = argument(node, "x"), argument(node, "y"), argument(node, "w")
    return (MultiplyAdds(math.prod(_shape(node, sizes)) * math.prod(_shape(w, sizes)[1:]), (x, y, w)),)


def _einsum(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    """A contraction of two tensors: each element of the result is summed over the labels that are not in it."""
    equation, operands = argument(node, "equation"), argument(node, "operands")
    if len(operands) == 1:
        return ()
    if len(operands) > 2:
        raise _UnknownSizeError  # torch chooses the contraction order
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    labels = inputs.replace("...", "").replace(",", "")
    kept = output if arrow else "".join(label for label in labels if labels.count(label) == 1)
    extent: dict[str, int] = {}
    for term, operand in zip(inputs.split(","), operands, strict=True):
        extent |= _extents(term, _shape(operand, sizes))
    summed = math.prod(size for label, size in extent.items() if label not in kept)
    return (MultiplyAdds(math.prod(_shape(node, sizes)) * summed, tuple(operands)),)


def _extents(term: str, shape: Sequence[int]) -> dict[str, int]:
    """The size of each label of one operand; dimensions under `...` have none."""
    before, dots, after = term.partition("...")
    found = dict(zip(before, shape, strict=False))
    return found | dict(zip(after, shape[len(shape) - len(after) :], strict=True)) if dots else found


def _attention(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    q, k, v = argument(node, "q"), argument(node, "k"), argument(node, "v")
    query, keys, values = _shape(q, sizes), _shape(k, sizes)[-2], _shape(v, sizes)[-1]
    rows = math.prod(query[:-1]) * keys
    return (MultiplyAdds(rows * query[-1], (q, k)), MultiplyAdds(rows * values, (INSIDE, v)))


def _recurrent(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    """At every step each weight multiplies one vector: the input in the first layer, an internal state elsewhere."""
    x, params = argument(node, "x"), argument(node, "params")
    directions = 2 if argument(node, "bidirectional") else 1
    steps = math.prod(_shape(x, sizes)[:-1])
    group = len(params) // (argument(node, "num_layers") * directions)
    found = []
    for index, weight in enumerate(params):
        shape = _shape(weight, sizes)
        reads_input = index % group == 0 and index < group * directions
        if len(shape) == 2:
            found.append(MultiplyAdds(steps * math.prod(shape), (x if reads_input else INSIDE, weight)))
    return tuple(found)


def _cell(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    x, hx = argument(node, "x"), argument(node, "hx")
    hidden = hx[0] if isinstance(hx, list | tuple) else hx
    rows = math.prod(_shape(x, sizes)[:-1])
    pairs = ((x, argument(node, "w_ih")), (hidden, argument(node, "w_hh")))
    return tuple(MultiplyAdds(rows * math.prod(_shape(weight, sizes)), (value, weight)) for value, weight in pairs)


def _quantizing(count: Count, stored: int = 1) -> Count:
    """For an op that quantizes its float inputs to 8 bits itself: keep only the stored factors, which come last."""

    def counted(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
        found = count(node, sizes)
        return tuple(MultiplyAdds(each.count, each.factors[len(each.factors) - stored :]) for each in found)

    return counted


def _recurrent_dynamic(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    """Input and hidden state are both quantized dynamically."""
    steps = math.prod(_shape(argument(node, "x"), sizes)[:-1])
    weights = argument(node, "weights")
    return tuple(MultiplyAdds(steps * math.prod(_shape(weight, sizes)), (weight,)) for weight in weights)


def _out_dtype(node: fx.Node, sizes: Sizes) -> tuple[MultiplyAdds, ...]:
    """A matmul or convolution with the dtype of its accumulator: `out_dtype(op, dtype, x, w, ...)`."""
    given: tuple[Any, ...] = node.args
    inner, x, w = given[0], given[2], given[3]
    if short_name(inner) != "convolution":
        depth = _shape(x, sizes)[-1]
        return (MultiplyAdds(math.prod(_shape(node, sizes)) * depth, (x, w)),)
    is_transposed = given[8]
    meets = x if is_transposed else node
    return (MultiplyAdds(math.prod(_shape(meets, sizes)) * math.prod(_shape(w, sizes)[1:]), (x, w)),)


RECURRENT = ops_in(Family.RECURRENT)

_COUNTS: dict[str, Count] = {
    **dict.fromkeys(ops_in(Family.CONV), _convolution),
    **dict.fromkeys(ops_in(Family.CONV_TRANSPOSE), _transposed_conv),
    **{name: _product(*FACTORS[name]) for name in ops_in(Family.MATMUL)},
    "bilinear": _bilinear,
    "einsum": _einsum,
    "sdpa": _attention,
    **dict.fromkeys(RECURRENT, _recurrent),
    **dict.fromkeys(ops_in(Family.RECURRENT_CELL), _cell),
    "quantc.conv.default": _convolution,
    "quantc.conv_transpose.default": _transposed_conv,
    **dict.fromkeys(
        (f"quantc.{name}.default" for name in ("linear", "linear_grouped", "linear_weight_only")), _product("x", "w")
    ),
    "quantc.linear_dynamic.default": _quantizing(_product("x", "w")),
    "quantc.linear_both_dynamic.default": _quantizing(_product("x", "w"), stored=0),
    "quantc.matmul_dynamic.default": _quantizing(_product("x", "y")),
    "quantc.matmul_both_dynamic.default": _quantizing(_product("x", "y"), stored=0),
    "quantc.conv_dynamic.default": _quantizing(_convolution),
    "quantc.conv_transpose_dynamic.default": _quantizing(_transposed_conv),
    **dict.fromkeys((f"quantc.{name}_dynamic.default" for name in RECURRENT), _recurrent_dynamic),
    **dict.fromkeys((f"quantc.{name}_cell_dynamic.default" for name in RECURRENT), _quantizing(_cell)),
    "quantc.matmul.default": _product("x", "y"),
    "higher_order.out_dtype": _out_dtype,
}
