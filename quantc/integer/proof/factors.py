"""Factors of a program's convs and matmuls, read from its Q/DQ form or its integer form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from quantc.integer.grid import grid_of
from quantc.integer.library import op_of
from quantc.integer.proof.bounds import (
    Layout,
    Reach,
    by_channel,
    decisive,
    difference_type,
    pair_reach,
    range_reach,
    sum_reach,
)
from quantc.integer.proof.integer_ranges import Levels, levels_before, levels_of
from quantc.ir.dialect import FACTORS, argument, op_name, ops_in, position
from quantc.ir.mac_count import Sizes, example_sizes
from quantc.ir.op_row import Family
from quantc.ir.program import Program
from quantc.ir.size_expressions import evaluate
from quantc.ir.types import tensor_type
from quantc.qdq.ops import is_dequantize
from quantc.spec.instruction_sets import SIGN_SHIFT, Neighbours, PairSums

SUMMED_ON_LAST_AXIS = ops_in(Family.MATMUL)
"""Products that sum over the last axis of `x`."""


@dataclass(frozen=True, eq=False)
class Weights:
    """A constant factor, in the shape of `bounds.by_channel`."""

    levels: Tensor
    """The integers as they are stored."""
    centered: Tensor
    """Less their zero points."""
    signed: bool

    @staticmethod
    def of(w: Tensor, zero_points: Tensor, by_channel: Callable[[Tensor], Tensor]) -> Weights:
        """A stored weight, with broadcastable zero points."""
        levels = by_channel(w)
        wide = difference_type(w.dtype)
        centered = by_channel(w.to(wide) - zero_points.to(wide)) if bool(zero_points.any()) else levels
        return Weights(levels, centered, w.dtype.is_signed)

    @property
    def multiplied(self) -> Tensor:
        """The int8 values that kernels multiply."""
        return self.levels if self.signed else self.levels.to(torch.int64) - SIGN_SHIFT


@dataclass(frozen=True, eq=False)
class Factors:
    """One conv or matmul: activations by weights, or by other activations."""

    node: fx.Node
    x: Levels
    other: Weights | Levels
    bias: Tensor | None = None
    """In steps of the accumulator."""
    count: int | None = None
    """Number of terms in a sum of products of two activations; None if unknown."""

    @property
    def channels(self) -> int:
        return self.other.levels.shape[0] if isinstance(self.other, Weights) else 1

    @property
    def is_bytes(self) -> bool:
        """True if both factors are 8-bit, so that 8-bit instructions apply."""
        narrow = not isinstance(self.other, Levels) or self.other.is_byte
        return self.x.is_byte and narrow

    def accumulators(self) -> Reach | None:
        """Bounds of the accumulators; None if the number of summands is unknown."""
        if isinstance(self.other, Weights):
            return sum_reach(self.other.centered, *self.x.centered, self.bias)
        return None if self.count is None else range_reach(self.count, self.x.centered, self.other.centered)

    def pairs(self, sums: PairSums, qmax: int | None = None) -> Reach:
        """Bounds of pair sums; `qmax` substitutes a smaller largest activation."""
        low, high = sums.multiplied(self.x.qmin, self.x.qmax if qmax is None else qmax, self.x.signed)
        return pair_reach(self.decisive(sums), low, high)

    def decisive(self, sums: PairSums) -> Tensor:
        """Int8 values of the largest and smallest pair sums, by output channel: int64."""
        found = self._decisive.get(sums.neighbours)
        if found is None:
            found = self._decisive[sums.neighbours] = self._find_decisive(sums)
        return found

    @cached_property
    def _decisive(self) -> dict[Neighbours, Tensor]:
        return {}

    def _find_decisive(self, sums: PairSums) -> Tensor:
        if isinstance(self.other, Weights):
            return decisive(self.other.multiplied, sums.neighbours).to(torch.int64)
        shift = 0 if self.other.signed else SIGN_SHIFT
        ends = torch.tensor([self.other.qmin, self.other.qmax]) - shift
        return ends.repeat(2).reshape(1, 4, 1)  # each twice: both products of a pair may have it


def factors(program: Program) -> Iterator[Factors]:
    """Convs and matmuls of a converted program with two integer factors, in program order."""
    sizes = example_sizes(program)
    for _, graph in program.graphs():
        for node in graph.nodes:
            found = _in_qdq(program, node, sizes) if op_name(node) in FACTORS else _in_integers(program, node, sizes)
            if found is not None:
                yield found


def layout_of(op: str) -> Layout:
    """Position of the output channels in an op's second operand."""
    if op.startswith("conv_transpose"):
        return "transposed"
    return "rows" if op.startswith(("conv", "linear")) else "columns"


def weight_by_channel(node: fx.Node, weight: Tensor) -> Tensor:
    """The constant second operand of a conv or matmul, in the shape of `bounds.by_channel`."""
    layout = layout_of(op_name(node))
    groups = argument(node, "groups") if layout == "transposed" else 1
    return _by_channel(weight, layout, groups)


# -- Q/DQ --------------------------------------------------------------------------------------------------------------


def _in_qdq(program: Program, node: fx.Node, sizes: Sizes) -> Factors | None:
    """A product of two dequantized tensors."""
    left, right = (argument(node, name) for name in FACTORS[op_name(node)])
    if not is_dequantize(left) or not is_dequantize(right):
        return None
    weight, constant = _levels(program, right), _levels(program, left)
    if any(levels is not None and levels.is_floating_point() for levels in (weight, constant)):
        return None  # a weight in narrow floats: the product is one of floats
    if weight is not None:
        zero_points = _zero_points(program, right, weight.dim())
        found = Weights.of(weight, zero_points, lambda w: weight_by_channel(node, w))
        return Factors(node, levels_before(left), found, _bias(program, node, left, right))
    if constant is not None and layout_of(op_name(node)) == "columns":
        zero_points = _zero_points(program, left, constant.dim())
        return Factors(node, levels_before(right), Weights.of(constant, zero_points, _rows))
    count = _summand_count(left, sizes) if op_name(node) in SUMMED_ON_LAST_AXIS else None
    return Factors(node, levels_before(left), levels_before(right), count=count)


def _levels(program: Program, dequantize: fx.Node) -> Tensor | None:
    """The integers of a constant; None if it is none."""
    source = dequantize.args[0]
    return program.tensor(source) if isinstance(source, fx.Node) else None


def _zero_points(program: Program, dequantize: fx.Node, rank: int) -> Tensor:
    """The zero points of a constant, shaped to go with it."""
    grid = grid_of(program, dequantize)
    if grid is None:
        return torch.zeros((), dtype=torch.int64)
    if grid.group is not None:
        return grid.zero_point.repeat_interleave(grid.group, dim=-1)
    return _along(grid.zero_point, grid.axis, rank)


def _bias(program: Program, node: fx.Node, x: fx.Node, weight: fx.Node) -> Tensor | None:
    """The bias in steps of the accumulator, where it is added there."""
    bias = argument(node, "b") if layout_of(op_name(node)) != "columns" else None
    if not isinstance(bias, fx.Node):
        return None
    if is_dequantize(bias):
        return _levels(program, bias)
    value, of_x, of_weight = program.tensor(bias), grid_of(program, x), grid_of(program, weight)
    if value is None or of_x is None or of_weight is None or of_weight.group is not None:
        return None
    scale = of_weight.scale  # with groups, a transposed convolution has its scales again for each group
    if scale.dim() and value.numel() > scale.numel():
        scale = scale.repeat(value.numel() // scale.numel())
    return torch.round(value.detach().double() / (of_x.scale * scale)).to(torch.int64)


# -- the integer form --------------------------------------------------------------------------------------------------

INTEGER_PRODUCTS: dict[str, Layout] = {
    "linear": "rows",
    "linear_grouped": "rows",
    "conv": "rows",
    "conv_transpose": "transposed",
    "matmul": "columns",
    "linear_dynamic": "rows",
    "conv_dynamic": "rows",
    "conv_transpose_dynamic": "transposed",
    "matmul_dynamic": "columns",
    "linear_both_dynamic": "rows",
    "matmul_both_dynamic": "columns",
}
"""Our own ops that multiply, and where their second operand has its output channels."""
RECURRENT = tuple(f"{kind}{cell}_dynamic" for kind in ops_in(Family.RECURRENT) for cell in ("", "_cell"))
"""Recurrent ops, which have several weights."""


def _in_integers(program: Program, node: fx.Node, sizes: Sizes) -> Factors | None:
    """A product that is one of our own ops."""
    op = op_of(node.target)
    if op is not None and op.name in RECURRENT:
        return _of_all_weights(program, node)
    if op is None or op.name not in INTEGER_PRODUCTS:
        return None
    layout = INTEGER_PRODUCTS[op.name]
    name = "y" if layout == "columns" else "w"
    left, right = argument(node, "x"), argument(node, name)
    zero_points = [argument(node, "x_zero_point"), argument(node, f"{name}_zero_point")]
    weight, constant = _integers(program, right), _integers(program, left)
    if weight is not None:
        groups = argument(node, "groups") if layout == "transposed" else 1
        stored = _stored_zero_points(program, zero_points[1], node, weight, layout)
        found = Weights.of(weight, stored, lambda w: _by_channel(w, layout, groups))
        return Factors(
            node, _comes(node, "x") or levels_of(program, left, zero_points[0]), found, _bias_steps(program, node)
        )
    pairs = zip(("x", name), (left, right), zero_points, strict=True)
    x, y = (_comes(node, side) or levels_of(program, *pair) for side, *pair in pairs)
    if constant is not None:
        return Factors(node, y, Weights.of(constant, torch.tensor(zero_points[0]), _rows))
    return Factors(node, x, y, count=_summand_count(left, sizes))


def _of_all_weights(program: Program, node: fx.Node) -> Factors | None:
    """The products of a recurrent op as one: its weights below one another, the narrow ones filled up with zeros."""
    target: Any = node.target
    listed = position(target, "weights") >= 0
    nodes = argument(node, "weights") if listed else [argument(node, name) for name in ("w_ih", "w_hh")]
    found, x = [_integers(program, each) for each in nodes], _comes(node, "x")
    weights = [weight for weight in found if weight is not None]
    if x is None or len(weights) < len(found):
        return None
    widest = max(weight.shape[1] for weight in weights)
    rows = torch.cat([functional.pad(weight, (0, widest - weight.shape[1])) for weight in weights])
    return Factors(node, x, Weights.of(rows, torch.zeros((), dtype=torch.int64), lambda w: _by_channel(w, "rows", 1)))


def _comes(node: fx.Node, side: str) -> Levels | None:
    """Integers of a factor that an op quantizes at run time; None if it is an integer operand."""
    target: Any = node.target
    prefix = next((prefix for prefix in (f"{side}_", "") if position(target, f"{prefix}eps") >= 0), None)
    if prefix is None:
        return None
    qmin, qmax, dtype = (argument(node, f"{prefix}{name}") for name in ("qmin", "qmax", "dtype"))
    return Levels(qmin, qmax, dtype, argument(node, f"{side}_zero_point"))


def _bias_steps(program: Program, node: fx.Node) -> Tensor | None:
    """The bias in steps of the accumulator; where the steps are found as the program runs, it is added after them."""
    target: Any = node.target
    bias = argument(node, "bias") if position(target, "bias") >= 0 else None
    return None if bias is None else _integers(program, bias)


def _integers(program: Program, node: Any) -> Tensor | None:
    """A constant that is integers."""
    found = program.tensor(node)
    return None if found is None or found.is_floating_point() else found


def _stored_zero_points(program: Program, given: Any, node: fx.Node, weight: Tensor, layout: Layout) -> Tensor:
    held = program.tensor(given) if isinstance(given, fx.Node) else None
    if held is None:
        return torch.zeros((), dtype=torch.int64)
    if held.dim() == 2:
        return held.repeat_interleave(argument(node, "group_size"), dim=-1)
    axis = {"rows": 0, "transposed": 1, "columns": weight.dim() - 1}[layout]
    return _along(held, axis if held.dim() else None, weight.dim())


# -- both --------------------------------------------------------------------------------------------------------------


def _along(values: Tensor, axis: int | None, rank: int) -> Tensor:
    """One value, or one for each place on an axis, shaped to go with a tensor of that rank."""
    return values if axis is None else values.reshape([-1 if dim == axis else 1 for dim in range(rank)])


def _rows(constant: Tensor) -> Tensor:
    """The first operand of a matrix product, when it is the constant."""
    return constant.reshape(-1, constant.shape[-1], 1)


def _by_channel(w: Tensor, layout: Layout, groups: int) -> Tensor:
    return by_channel(w.unsqueeze(-1) if w.dim() == 1 else w, layout, groups)


def _summand_count(x: fx.Node, sizes: Sizes) -> int | None:
    """Number of summands of a matmul."""
    kind = tensor_type(x)
    if kind is None:
        return None
    size = kind.shape[-1]
    return size if isinstance(size, int) else evaluate(size, sizes)
