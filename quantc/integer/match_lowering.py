"""A claimed match of a Q/DQ program during its lowering to integer ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, fx

from quantc.integer.fixed_point import mantissa_and_shift, shift_of, whole_shifts
from quantc.integer.grid import Grid, grid_of
from quantc.integer.library import op_of
from quantc.ir.dialect import argument, is_op
from quantc.ir.program import Program
from quantc.ir.types import TensorType, tensor_type
from quantc.qdq.ops import is_dequantize, is_quantize
from quantc.spec.arithmetic import EXACT, INT32_BITS, Arithmetic

Curves = Literal["exact", "float"]
"""Form of an activation after a conv or matmul, clamps apart: a step table, or the float op."""


class NotIntegerError(Exception):
    """The reason why a match stays in float. Never reaches the user: it is recorded in the plan."""


@dataclass(frozen=True)
class Quantized:
    """A quantized operand: its integers and their grid."""

    node: fx.Node
    grid: Grid


@dataclass
class Task:
    """A match to be lowered: its core op, the epilogue ops of the match, and its users.

    `core` is the first op. `tail` are the ops after it that the rule claimed with it (an add, an activation).
    """

    program: Program
    nodes: tuple[fx.Node, ...]
    arithmetic: Arithmetic = EXACT
    curves: Curves = "exact"
    notes: list[str] = field(default_factory=list)
    made: list[fx.Node] = field(default_factory=list)
    """The nodes that compute what the match computed."""

    @property
    def core(self) -> fx.Node:
        return self.nodes[0]

    @property
    def tail(self) -> tuple[fx.Node, ...]:
        return self.nodes[1:]

    @property
    def root(self) -> fx.Node:
        return self.nodes[-1]

    # -- what it reads ---------------------------------------------------------------------------------------

    def argument(self, name: str) -> Any:
        return argument(self.core, name)

    def quantized(self, value: Any) -> Quantized:
        """An operand that must be quantized."""
        if self.grouped(value) is not None:
            raise NotIntegerError(f"{value.name} has a scale for each group")
        found = self.maybe_quantized(value)
        if found is None:
            name = value.name if isinstance(value, fx.Node) else repr(value)
            raise NotIntegerError(f"{name} does not come quantized")
        return found

    def maybe_quantized(self, value: Any) -> Quantized | None:
        """The operand if it is quantized per tensor or per channel; else None."""
        found = self._dequantize_source(value)
        return found if found is not None and found.grid.group is None else None

    def grouped(self, value: Any) -> Quantized | None:
        """The operand if it is quantized per group; else None."""
        found = self._dequantize_source(value)
        return found if found is not None and found.grid.group is not None else None

    def _dequantize_source(self, value: Any) -> Quantized | None:
        if not isinstance(value, fx.Node) or not is_dequantize(value):
            return None
        source, grid = value.args[0], grid_of(self.program, value)
        if grid is None or not isinstance(source, fx.Node):
            return None
        return Quantized(source, grid)

    def whole(self, value: Any) -> Quantized:
        """An operand that must be quantized per tensor."""
        found = self.quantized(value)
        if not found.grid.is_whole:
            raise NotIntegerError(f"{found.node.name} has a scale for each channel")
        return found

    def constant(self, value: Any) -> Tensor | None:
        """Tensor of a constant operand; None if it is not constant."""
        return self.program.tensor(value) if isinstance(value, fx.Node) else None

    # -- what it yields --------------------------------------------------------------------------------------

    def quantizers(self, node: fx.Node | None = None) -> tuple[fx.Node, ...]:
        """Quantize users of the match's result; empty if any user reads it in float."""
        users = tuple((node or self.root).users)
        return users if users and all(is_quantize(user) for user in users) else ()

    def grid(self, quantizer: fx.Node) -> Grid:
        found = grid_of(self.program, quantizer)
        if found is None or not found.is_whole:
            raise NotIntegerError(f"{quantizer.name} does not have one known scale")
        return found

    # -- writing ---------------------------------------------------------------------------------------------

    def emit(self, target: Any, *args: Any, dtype: torch.dtype, like: fx.Node | None = None) -> fx.Node:
        """A new node of `dtype` with the shape of `like`, before it (the root by default)."""
        op = op_of(target)
        if op is not None and self.arithmetic.ending and "qmax" in op.schema and "rounding" not in op.schema:
            raise NotIntegerError(f"{op.name} rounds half to even and saturates, and the target does not")
        source = like if like is not None else self.root
        kind = tensor_type(source)
        made = None if kind is None else TensorType(dtype, kind.shape)
        return self.program.emit(target, args, before=source, like=source, value=made)

    def check_shifts(self, *multipliers: Tensor) -> None:
        """Refuse multipliers that the target cannot shift by, if it can only shift."""
        if self.arithmetic.multiplier == "shift" and any(shift_of(item) is None for item in multipliers):
            raise NotIntegerError("the ratio of its scales is no power of two, and the target only shifts")

    def check_room(self, largest: int) -> None:
        """Refuse an accumulator that can be so large, if the target's is narrower."""
        bits = self.arithmetic.sum_bits
        if bits < INT32_BITS and largest >= 2 ** (bits - 1):
            raise NotIntegerError(f"its accumulator could need {largest.bit_length() + 1} bits, and has {bits}")

    def keep(self, hint: str, value: Tensor) -> fx.Node:
        """A new constant, named after the core."""
        return self.program.constant(f"{self.core.name}_{hint}", value, before=self.core)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace a node of the match, or a quantizer of its result, by a new node that inherits the claim."""
        self.claim(new)
        self.stand_in(old, new)

    def claim(self, node: fx.Node) -> None:
        """Record a new node as the match's computation: `coverage()` lists it under its rule."""
        claim = self.program.plan.claims.get(self.root)
        if claim is not None:
            self.program.plan.claims[node] = claim
        self.made.append(node)

    def keep_name(self) -> None:
        """Give the first new node the core's name: users know it by that."""
        if not self.made:
            return
        core, made = self.core, self.made[0]
        core.name, made.name = made.name, core.name
        origin = self.program.origins.get(core)
        if origin is not None:
            self.program.origins[made] = origin

    def stand_in(self, old: fx.Node, new: fx.Node) -> None:
        """Replace a node by a new one without a claim: a step after the claimed one."""
        name = old.name
        self.program.replace(old, new)
        self.program.plan.lowered[new] = name

    def fixed(self, multiplier: Tensor) -> tuple[fx.Node, fx.Node | None]:
        """A multiplier as constant arguments, in the requested form."""
        if self.arithmetic.multiplier == "float64":
            return self.keep("multiplier", multiplier.double()), None
        self.check_shifts(multiplier)
        if self.arithmetic.multiplier == "shift":
            mantissa, shift = whole_shifts(multiplier)
        else:
            mantissa, shift = mantissa_and_shift(multiplier.double())
        return self.keep("mantissa", mantissa), self.keep("shift", shift)

    def onto(self, grid: Grid, multiplier: Tensor, bounds: Bounds | None = None) -> tuple[Any, ...]:
        """Epilogue arguments of an op with a result on `grid`; `multiplier` rescales its accumulator."""
        low, high = (grid.qmin, grid.qmax) if bounds is None else bounds.on(grid)
        return (*self.fixed(multiplier), grid.one_zero_point, low, high, grid.dtype, *self.arithmetic.ending)

    def to_float(self, multiplier: Tensor) -> tuple[Any, ...]:
        """Epilogue arguments of an op with a float32 result."""
        return (self.keep("multiplier", multiplier.double()), None, 0, 0, 0, torch.float32)


@dataclass(frozen=True)
class Bounds:
    """Bounds of a clamp at the end of a match, as real numbers."""

    low: float = -math.inf
    high: float = math.inf

    def on(self, grid: Grid) -> tuple[int, int]:
        """The bounds as levels of a grid."""
        low = grid.qmin if self.low == -math.inf else grid.level(self.low)
        high = grid.qmax if self.high == math.inf else grid.level(self.high)
        # as torch has it: where the bounds cross, the upper one wins
        return min(low, high), high

    def then(self, other: Bounds) -> Bounds:
        low = min(max(self.low, other.low), other.high)
        return Bounds(low, min(max(self.high, other.low), other.high))


def bounds_of(node: fx.Node) -> Bounds | None:
    """Bounds of a relu, or of a clamp to numbers; None for any other op."""
    if is_op(node, "relu"):
        return Bounds(low=0.0)
    if not is_op(node, "clamp"):
        return None
    low, high = argument(node, "min"), argument(node, "max")
    if isinstance(low, fx.Node) or isinstance(high, fx.Node):
        return None
    return Bounds(-math.inf if low is None else float(low), math.inf if high is None else float(high))


def tail_bounds(tail: Sequence[fx.Node]) -> Bounds | None:
    """Bounds of a tail that only clamps; None if it does more."""
    total = Bounds()
    for node in tail:
        bounds = bounds_of(node)
        if bounds is None:
            return None
        total = total.then(bounds)
    return total
